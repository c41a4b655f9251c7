"""The folder of the engine's socket: locked while it is used, and swept when its owner was killed."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from headway.server.engine.private_folder import PREFIX, SOCKET, private_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_behind(folder: Path) -> Path:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(folder / SOCKET))
    return folder


def test_what_a_killed_server_left_is_removed_and_what_another_uses_stays(temporary: Path) -> None:
    left = left_behind(temporary / f"{PREFIX}12345678")
    (left / "headway-ranks-abc").mkdir()
    (left / "headway-ranks-abc" / "ranks").touch()
    (temporary / f"{PREFIX}abcdefgh").mkdir()
    with private_folder() as used:
        assert sorted(temporary.iterdir()) == [used]
        with private_folder() as second:
            assert sorted(temporary.iterdir()) == sorted([used, second])
        assert used.is_dir()
    assert not left.exists()
    assert not any(temporary.iterdir())


def test_what_no_server_made_stays(temporary: Path) -> None:
    with_file = left_behind(temporary / f"{PREFIX}notes")
    (with_file / "notes.txt").write_text("mine")
    (temporary / f"{PREFIX}file").write_text("mine")
    elsewhere = left_behind(temporary / "elsewhere")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    left_behind(temporary / "headway-models")
    kept = {*temporary.iterdir(), with_file / "notes.txt", elsewhere / SOCKET}
    with private_folder():
        assert all(path.exists() for path in kept)


def test_the_folders_of_other_users_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_behind(temporary / f"{PREFIX}12345678")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with private_folder():
        assert (left / SOCKET).exists()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, []

    def swept_once(*arguments: object, **named: object) -> str:
        made.append(make(*arguments, **named))  # type: ignore[call-overload]
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)
    with private_folder() as folder:
        assert (len(made), str(folder)) == (2, made[1])
        assert folder.is_dir()
