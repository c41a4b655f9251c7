"""Commands run in the test's own process, without an engine beside them."""

from __future__ import annotations

import pytest

from headway.server import cli


@pytest.fixture(autouse=True)
def no_engine_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no engine is wanted")

    monkeypatch.setattr(cli, "EngineChild", refuse)
