"""What the process of an engine leaves is removed with it."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from headway.server.engine.child import EngineChild

MAKE_FOLDER = "import tempfile, time; tempfile.mkdtemp(prefix='ranks-'); time.sleep(600)"


def test_temporary_files_of_a_killed_engine_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(EngineChild((sys.executable, "-c", MAKE_FOLDER))) as child:
        deadline = time.monotonic() + 60
        while not (found := list(tmp_path.rglob("ranks-*"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert found[0].parent.parent == tmp_path
        child.kill()
    assert list(tmp_path.iterdir()) == []
