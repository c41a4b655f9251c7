"""Terminal output while a model loads, and when it is served."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headway import __version__
from headway.engine import DRAFTER_TRAITS, EngineInfo, Phase
from headway.server.cli.endings import ReaderGoneError
from headway.server.engine.client import EngineClient

POLL_SECONDS = 0.1
LINE_EVERY_PERCENT, LINE_SECONDS = 25, 5.0
PHASES: dict[Phase, str] = {
    "load": "loading weights",
    "capture": "trying and capturing steps",
    "serve": "ready",
}
COMPLETION = {"prompt": "def read_config(path):\n", "max_tokens": 64, "repetition_penalty": 1.1}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def show(text: str) -> None:
    """Writes to stdout at once. Raises ReaderGoneError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # the buffer is flushed once more at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise ReaderGoneError from None


async def wait_with_progress(engine: EngineClient, tell: Callable[[str], None] | None = None) -> EngineInfo:
    """Shows the progress of the start. `tell` gets a line at each quarter of a phase and every
    LINE_SECONDS; None shows a bar on a terminal, and lines on stderr elsewhere. Raises as the engine does."""
    console = Console(stderr=True)
    if tell is None and console.is_terminal:
        showing = asyncio.create_task(_show_bar(engine, console))
    else:
        showing = asyncio.create_task(_show_lines(engine, tell or _print_line))
    try:
        return await engine.wait_until_ready()
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


async def _show_bar(engine: EngineClient, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(PHASES["load"], total=1.0)
        while True:
            status = engine.status()
            progress.update(task, description=PHASES[status.phase], completed=status.progress)
            await asyncio.sleep(POLL_SECONDS)


async def _show_lines(engine: EngineClient, tell: Callable[[str], None]) -> None:
    began = told = time.monotonic()
    shown: tuple[Phase, int] | None = None
    while True:
        status, now = engine.status(), time.monotonic()
        percent = int(100 * status.progress)
        reached = (status.phase, percent // LINE_EVERY_PERCENT)
        if reached != shown or now - told >= LINE_SECONDS:
            shown, told = reached, now
            tell(f"{PHASES[status.phase]}: {percent} %, {now - began:.0f} s")
        await asyncio.sleep(POLL_SECONDS)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def banner(
    model: str,
    info: EngineInfo,
    url: str,
    unix_socket: str | None = None,
    *,
    tool_format: str | None = None,
    chat_note: str | None = None,
) -> str:
    """Returns the text that people see when the server is ready.

    unix_socket: the path at which the server listens instead of the address of its URL. tool_format: the
    format of the model's tool calls; None for a model that cannot chat. chat_note: a remark for users on the
    model's chats.
    """
    if info.draft_check.turns_speculation_off:
        depth = "0: speculation is off, the drafter failed its check (GET /v1/speculation tells why)"
    elif info.depth:
        number = (
            f"0 to {info.depth}, chosen for each round,"
            if info.chooses_depth
            else f"{info.depth} drafts a round,"
        )
        depth = f"{number} {DRAFTER_TRAITS[info.drafter].by}"
    elif info.has_draft_head:
        depth = "0: speculation is off"
    else:
        depth = "0: no MTP head is loaded (--drafter ngram drafts without one)"
    can_chat = tool_format is not None and chat_note is None
    path, example = ("chat/completions", CHAT) if can_chat else ("completions", COMPLETION)
    body = json.dumps(example, separators=(",", ":"))
    num_tokens = info.num_blocks * info.block_size
    ranks = f", {info.num_ranks} ranks" if info.num_ranks > 1 else ""
    of_weights = "" if info.cpu_weights == "full" else f", weights in {info.cpu_weights}"
    lines = {
        "model": f"{model} ({info.architecture}, {readable_count(info.num_parameters)} parameters, "
        f"{info.dtype} on {info.device}{of_weights}{ranks})",
        "memory": f"weights {readable_size(info.weights_bytes)}, KV cache {readable_size(info.kv_cache_bytes)}",
        "blocks": f"{info.num_blocks:,} of {info.block_size} tokens: {num_tokens:,} tokens in all",
        "context": f"{info.max_model_len:,} tokens, up to {info.max_running:,} requests at once",
        "depth": depth,
        "url": url if unix_socket is None else f"{url} at {unix_socket}",
    }
    if chat_note is not None:
        lines["chat"] = chat_note
    elif tool_format is not None:
        lines["tools"] = f"{tool_format} (--tool-format)"
    if info.has_dummy_weights or info.synthetic_acceptance is not None:
        lines["warning"] = "random weights or synthetic acceptance: the text means nothing"
    if info.loss is not None:
        lines["LOSSY"] = info.loss
    table = "\n".join(f"  {name:<8} {value}" for name, value in lines.items())
    curl = "curl" if unix_socket is None else f"curl --unix-socket {shlex.quote(unix_socket)}"
    return f"\nHeadway {__version__}\n{table}\n\n  {curl} {url}/v1/{path} -d '{body}'\n"


def banner_fields(
    model: str, info: EngineInfo, url: str, unix_socket: str | None = None
) -> dict[str, object]:
    """Returns the banner's content as log fields."""
    place = {"url": url} if unix_socket is None else {"url": url, "unix_socket": unix_socket}
    return {"model": model, **place, **msgspec.structs.asdict(info)}


def readable_count(count: int) -> str:
    """Returns a readable number: 7830000000 -> "7.8 B"; 4321 -> "4,321"."""
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def readable_size(num_bytes: float) -> str:
    """Returns a readable size: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
