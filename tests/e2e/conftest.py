"""A server for a whole module, or servers with flags of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from headway_testing.daemon import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from running_server()


@pytest.fixture(scope="session")
def start() -> Callable[..., Iterator[Server]]:
    """For fixtures that want a server of their own: `yield from start("--depth", "0")`."""
    return running_server
