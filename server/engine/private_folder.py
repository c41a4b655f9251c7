"""A folder for the socket between the API process and its engine, and the removal of folders that killed
servers left behind.

The folder is locked while its owner lives. The kernel holds the lock: it ends with the process, however that
ends, and works between containers that share the folder of temporary files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "headway-engine-"
SOCKET = "engine"
OF_ENGINES = ("headway-", "tmp")  # prefixes of the temporary folders that an engine makes there

logger = logging.getLogger("headway.server")


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yields a new folder, which is removed at the end, and removes those that others left behind. Raises
    OSError."""
    sweep()
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Removes folders whose owners are gone: only this user's, and only the files that a server puts
    there."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, another user's, or just removed
            _sweep(folder)


def _sweep(folder: Path) -> None:
    lock = _open(folder)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / SOCKET).unlink(missing_ok=True)
        for left in (found for prefix in OF_ENGINES for found in folder.glob(f"{prefix}*")):
            shutil.rmtree(left, ignore_errors=True)
        folder.rmdir()
        logger.info("removed %s, which a server that was killed had left", folder)
    finally:
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    """Returns a new folder and its lock. If a sweep removes the folder before it is locked, another one is
    made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = _open(folder)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # no sweep gets a lock on a file system without locks, either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
