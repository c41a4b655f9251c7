"""The API process before the engine of fast_process.py, for measurements: its life, its costs, its clients.

`python -m headway_testing.api_process SECONDS [PROFILE [TEMPLATE]]` is that process: `headway serve` with
another engine, whose rounds take SECONDS; a cProfile goes to PROFILE, if it is no empty name; chats are
rendered by that template.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from headway_testing.fast_process import TOKENS_PER_EVENT

SUPPORT = Path(__file__).resolve().parents[1]
MODEL = Path(str(files("headway.engine.demo")))
STOP = ["\n# That is all.", "<|stop here|>"]
Process = subprocess.Popen[str]


def main(round_seconds: str, profile: str = "", template: str | None = None) -> int:
    from headway.engine import EngineConfig
    from headway.server.base.config import ModelSource, ServerConfig
    from headway.server.engine.client import EngineClient

    engine = [sys.executable, "-P", "-m", "headway_testing.fast_process", round_seconds]
    command = importlib.import_module("headway.server.cli.serve")
    config = ServerConfig(port=0, chat_template=template)
    command.EngineClient = partial(EngineClient, command=engine)
    run = partial(command.serve, config, ModelSource(str(MODEL)), EngineConfig(model_path=""))
    if not profile:
        return run()
    import cProfile

    profiler = cProfile.Profile()
    status = profiler.runcall(run)
    profiler.dump_stats(profile)
    return status


# --- the process, from outside ---------------------------------------------------------------------------


@contextmanager
def api_process(
    round_seconds: float, *, profile: str | None = None, template: str | None = None
) -> Iterator[tuple[Process, str]]:
    """Yields the process with its URL."""
    command = [sys.executable, "-P", "-m", "headway_testing.api_process", str(round_seconds)]
    command += [profile or ""] if template is None else [profile or "", template]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, _wait_for_url(process)
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _wait_for_url(process: Process) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            return match[0]
    raise RuntimeError("the server did not start")


def read_sent(process: Process, num_streams: int) -> dict[str, list[float]]:
    """Returns when the engine sent the events of each stream of one run. It tells in a line of their own of
    streams that ended before the others came."""
    assert process.stderr is not None
    sent: dict[str, list[float]] = {}
    for line in process.stderr:
        if line.startswith('{"sent"'):
            sent |= json.loads(line)["sent"]
        if len(sent) == num_streams:
            return sent
    raise RuntimeError("the engine has not reported")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process: its clock has the id that clock_getcpuclockid(3)
    makes."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


# --- its clients -----------------------------------------------------------------------------------------

Piece = tuple[float, int]  # when it came, characters of the text so far


async def run_streams(url: str, num_streams: int, num_events: int) -> list[list[Piece]]:
    """Returns what each stream received, up to its end."""
    streams = [
        Stream(number, request(url, [number, *source_ids()], TOKENS_PER_EVENT * num_events))
        for number in range(num_streams)
    ]
    await asyncio.gather(*(stream.read(url) for stream in streams))
    return [stream.pieces for stream in streams]


def request(url: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """Returns the HTTP request of a stream, whose number is the first token of its prompt."""
    content = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "stop": STOP}
    body = json.dumps(content)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


class Stream:
    """A bare socket: an HTTP client would take more time than the server. Mutable: what has come."""

    def __init__(self, number: int, request: bytes) -> None:
        self._number = number
        self._request = request
        self.pieces: list[Piece] = []

    async def read(self, url: str) -> None:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(self._request)
        num_characters = 0
        data = b""
        try:
            while True:
                received = await reader.read(1 << 16)
                assert received, f"stream {self._number} ended early: {data[-300:]!r}"
                now = time.monotonic()
                *lines, data = (data + received).split(b"\n\n")
                for line in lines:
                    if (place := line.find(b"data: ")) < 0:
                        continue
                    if line[place + 6 :] == b"[DONE]":
                        return
                    (choice,) = json.loads(line[place + 6 :])["choices"]
                    num_characters += len(choice["text"])
                    self.pieces.append((now, num_characters))
        finally:
            writer.close()


@cache
def source_ids() -> list[int]:
    """Source code, which the fake engine says again and again."""
    text = json.loads((MODEL / "heldout_prompts.json").read_text())[0]["text"]
    ids: list[int] = tokenizer().encode(text).ids
    return ids


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def arrivals(streams: list[list[Piece]], sent: dict[str, list[float]]) -> Iterator[tuple[float, float]]:
    """Returns for each event when it was sent, and how long after that its last character was read."""
    ids = source_ids()
    decode = tokenizer().decode
    num_events = max(map(len, sent.values()))
    script = [ids[i % len(ids)] for i in range(TOKENS_PER_EVENT * len(ids))]
    per_cycle = [len(decode(script[: TOKENS_PER_EVENT * n])) for n in range(len(ids) + 1)]
    through = [per_cycle[-1] * (n // len(ids)) + per_cycle[n % len(ids)] for n in range(1, num_events + 1)]
    for number, pieces in enumerate(streams):
        times = sent[str(number)]
        event = 0
        for came, num_characters in pieces:
            while event < len(times) and through[event] <= num_characters:
                yield times[event], came - times[event]
                event += 1


def median_and_p99(seconds: Sequence[float]) -> tuple[float, float]:
    quantiles = statistics.quantiles(seconds, n=100)
    return quantiles[49], quantiles[98]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
