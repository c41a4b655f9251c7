"""Servers that modules share, and servers with flags of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from headway_testing.chat_models import HERMES_TEMPLATE, demo_with_template, scripted_model
from headway_testing.daemon import Server, SharedServers, running_scripted_server, running_server

SHARED = pytest.StashKey[SharedServers]()


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Iterator[SharedServers]:
    """The servers that several modules use: starting one takes longer than most of their tests."""
    servers = request.config.stash[SHARED] = SharedServers()
    yield servers
    servers.stop()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the shared servers after the last test of this folder, where other tests follow."""
    is_last = nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent)
    if is_last and (servers := item.config.stash.get(SHARED, None)):
        servers.stop()


@pytest.fixture
def server(shared: SharedServers) -> Server:
    """The embedded model. Its counters also hold what other modules sent."""
    return shared.running("embedded", running_server)


@pytest.fixture
def templated(shared: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The embedded model's weights with a template in Hermes form in their folder, as `demo-tools`."""

    def life() -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("templated") / "demo-tools"
        yield from running_server(str(demo_with_template(folder, HERMES_TEMPLATE)))

    return shared.running("templated", life)


@pytest.fixture
def scripted(shared: SharedServers, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A model that says what it is told, as `demo-tools`, with a template that --chat-template names."""

    def life() -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("scripted")
        model = scripted_model(folder / "demo-tools")
        file = folder / "template.jinja"
        file.write_text(
            HERMES_TEMPLATE.replace("<|im_start|>system\\n", "<|im_start|>system\\n[from the file]")
        )
        yield from running_scripted_server(str(model), "--chat-template", str(file))

    return shared.running("scripted", life)


@pytest.fixture
def guarded(shared: SharedServers) -> Server:
    """A server that wants a key (secret, or admin for what operators do) and chooses the depth of its
    rounds."""
    flags = ("--depth", "auto", "--max-depth", "4", "--api-key", "secret", "--admin-key", "admin")
    return shared.running("guarded", lambda: running_server(*flags))


@pytest.fixture(scope="session")
def start() -> Callable[..., Iterator[Server]]:
    """For fixtures that want a server of their own: `yield from start("--depth", "0")`."""
    return running_server
