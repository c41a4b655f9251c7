"""What is made once is whole or not there: after faults, kills, and beside other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.engine.chat_model.cache import cache_folder, make_once


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(unfinished: Path) -> Path:
    (unfinished / "scratch").write_text("scratch")
    made = unfinished / "made"
    made.mkdir()
    (made / "file").write_text("whole")
    return made


def test_only_what_was_made_is_kept(tmp_path: Path) -> None:
    folder = make_once(tmp_path / "deep" / "model", make)
    assert names_in(folder) == ["file"]
    assert names_in(folder.parent) == [".lock", "model"]


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    folder = make_once(tmp_path / "model", make)
    (folder / "file").write_text("kept")
    assert make_once(folder, make) == folder
    assert (folder / "file").read_text() == "kept"


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_fault_leaves_nothing_and_the_next_one_makes_it(tmp_path: Path, error: BaseException) -> None:
    def fail(unfinished: Path) -> Path:
        make(unfinished)
        raise error

    with pytest.raises(type(error)):
        make_once(tmp_path / "model", fail)
    assert names_in(tmp_path) == [".lock"]
    assert names_in(make_once(tmp_path / "model", make)) == ["file"]


# Another process: it notes that it makes, and takes a moment over it or dies.
PROCESS = """
import os, sys, time
from pathlib import Path
from headway.engine.chat_model.cache import make_once

folder, log, dies = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "dies"

def make(unfinished):
    with log.open("a") as line:
        line.write("made\\n")
    made = unfinished / "made"
    made.mkdir()
    time.sleep(0.5)
    (made / "file").write_text("whole")
    if dies:
        os._exit(9)
    return made

assert (make_once(folder, make) / "file").read_text() == "whole"
"""


def start(tmp_path: Path, end: str) -> subprocess.Popen[bytes]:
    arguments = [str(tmp_path / "cache" / "model"), str(tmp_path / "log"), end]
    return subprocess.Popen([sys.executable, "-P", "-c", PROCESS, *arguments])


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    assert start(tmp_path, "dies").wait(60) == 9
    cache = tmp_path / "cache"
    assert names_in(cache) == [".lock", ".unfinished"]
    assert names_in(make_once(cache / "model", make)) == ["file"]
    assert names_in(cache) == [".lock", "model"]


def test_of_two_processes_one_makes_it_and_both_have_it(tmp_path: Path) -> None:
    both = [start(tmp_path, "lives") for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_the_cache_is_in_the_home_folder_unless_xdg_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({} if value is None else {"XDG_CACHE_HOME": value}) == tmp_path / ".cache/headway"
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/headway")
