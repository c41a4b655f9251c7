"""Reads the small files of a model folder: regular files of bounded size. Every fault is a ModelError.

Knows nothing of their contents. Imports no torch: the API process reads through it, too.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from headway.engine.protocol.errors import ModelError

MAX_JSON_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 512 << 20


def is_folder(path: Path) -> bool:
    """Returns whether it is a folder. Raises ModelError if the system does not allow to look."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte in the name
        return False
    except OSError as error:
        raise _unreadable(path, error) from None


def is_regular_file(path: Path, *, max_bytes: int | None = None) -> bool:
    """Returns False if there is no such file. Raises ModelError for everything else that cannot be read as a
    file: a folder, a device, a pipe, a broken link, and a file of more than max_bytes."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ModelError(
                f"{path} is a link to {os.readlink(path)}, which does not exist; fetch the file again"
            ) from None
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a socket"
        raise ModelError(f"{path} is {kind}, it must be a regular file; fetch the file again")
    if max_bytes is not None and found.st_size > max_bytes:
        raise ModelError(
            f"{path} has {found.st_size:,} bytes, the limit is {max_bytes:,}; check that it is the right file"
        )
    return True


def check_readable(path: Path) -> None:
    """Raises ModelError for a file that cannot be opened, since libraries would not say why."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None


def read_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> str | None:
    """Returns the text of a UTF-8 file; None if there is no such file. Raises ModelError."""
    if not is_regular_file(path, max_bytes=max_bytes):
        return None
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:  # some file systems report no sizes
            raise ModelError(f"{path} has more than {max_bytes:,} bytes; check that it is the right file")
        return content.decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 ({error}); fetch the file again") from None


def read_json_object(path: Path, *, wanted: str = "an object") -> dict[str, object] | None:
    """Returns the content of a file with one JSON object; None if there is no such file. wanted: the name of
    the content in errors. Raises ModelError."""
    text = read_text(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():
            _check_characters(path, content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than Python's stack
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, it must be {wanted}")
    return content


def _check_characters(path: Path, content: object) -> None:
    """Raises ModelError for half of a character, which JSON may escape: it has no UTF-8, so that no
    tokenizer, template or answer could use it."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ModelError(f"{path} has a lone surrogate ({half}) in a string; fetch the file again") from None


def _unreadable(path: Path, error: OSError) -> ModelError:
    remedy = "check the path and its links"
    if isinstance(error, PermissionError):
        remedy = f"give user {os.getuid()} the right to read it"
    return ModelError(f"{path} cannot be read: {error.strerror or error}; {remedy}")
