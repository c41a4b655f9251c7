"""Makes folders once and keeps them. A folder is complete, or does not exist."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

UNFINISHED, LOCK = ".unfinished", ".lock"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns Headway's cache folder by the XDG rules, which ignore a relative XDG_CACHE_HOME."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "headway"


def make_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Returns the folder, which `make` makes if it is not there.

    make: gets an empty folder to work in, and returns the finished folder in it. One process makes the folder
    and others wait for it. The remains of a killed process are removed by the next. Raises what `make`
    raises, and then leaves nothing.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / UNFINISHED
    with (folder.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            os.rename(make(unfinished), folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder
