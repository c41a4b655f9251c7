"""Commands run in the test's own process, without an engine beside them and without variables of the
environment."""

from __future__ import annotations

import os

import pytest

from headway.engine import EngineConfig
from headway.server import cli
from headway.server.base.config import ModelSource, ServerConfig
from headway.server.cli import serve


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_engine_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no engine is wanted")

    monkeypatch.setattr(cli, "EngineChild", refuse)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, ModelSource, EngineConfig]]:
    """What `headway serve` would have started."""
    calls: list[tuple[ServerConfig, ModelSource, EngineConfig]] = []
    monkeypatch.setattr(serve, "serve", lambda *arguments: calls.append(arguments[:3]) or 0)
    return calls
