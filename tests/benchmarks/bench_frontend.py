"""What the API process costs by itself: a fake engine in a process of its own, 128 streams, 3 tokens an event.

Everything that `headway serve` does to tokens is on: frames, detokenisation, stop strings, chunks, HTTP. An
engine that sends a round each so many milliseconds sets the load; the processor time of the API process over
the run is what an event costs. Latency is from the engine's sending to a client's reading; readers share one
process. With --idle and --stalled as many connections are kept open beside the streams that ask nothing, or
that have asked for a stream and never read it.

    make bench-frontend
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer

SUPPORT = Path(__file__).resolve().parents[1] / "support"
MODEL = Path(str(files("headway.engine.demo")))
TOKENS_PER_EVENT = 3
STOP = ["\n# That is all.", "<|stop here|>"]
BAR_EVENTS_PER_CPU_SECOND = 20_000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    streams: int
    events: int  # of each stream
    round_seconds: float
    idle: int = 0
    stalled: int = 0


@dataclass(frozen=True)
class Figures:
    events_per_cpu_second: float
    events_per_second: float
    chunks_per_event: float
    latency_seconds: tuple[float, float]  # median and 99th percentile
    grown_bytes: int  # resident memory of the API process, over the run


def main() -> int:
    """Prints the figures; the exit status is 1 when the bar is missed at the highest load."""
    arguments = parse_arguments()
    if arguments.serve_with is not None:
        return serve(arguments.serve_with, profile=arguments.profile)
    company = arguments.idle, arguments.stalled
    loads = [Load(arguments.streams, arguments.events, ms / 1000, *company) for ms in arguments.round_ms]
    figures = [measure(load, profile=arguments.profile) for load in loads]
    for load, figure in zip(loads, figures, strict=True):
        median, p99 = (1000 * seconds for seconds in figure.latency_seconds)
        print(
            f"{load.streams} streams, a round each {1000 * load.round_seconds:g} ms: "
            f"{figure.events_per_second:,.0f} events/s, {figure.events_per_cpu_second:,.0f} events "
            f"({TOKENS_PER_EVENT * figure.events_per_cpu_second:,.0f} tokens) per CPU-second, "
            f"{figure.chunks_per_event:.2f} chunks an event, latency {median:.1f} ms median, {p99:.1f} ms p99, memory grew by {figure.grown_bytes / 2**20:.1f} MiB"
        )
    return int(max(f.events_per_cpu_second for f in figures) < BAR_EVENTS_PER_CPU_SECOND)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--events", type=int, default=400, help="of each stream")
    parser.add_argument(
        "--round-ms", type=float, nargs="+", default=[12.8, 6.4], help="loads, one after another"
    )
    parser.add_argument("--idle", type=int, default=0, help="kept connections that ask nothing")
    parser.add_argument("--stalled", type=int, default=0, help="streams of the same length that nobody reads")
    parser.add_argument("--profile", help="write a cProfile of the API process here (makes it slower)")
    parser.add_argument("--serve-with", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the API process -------------------------------------------------------------------------------------


def serve(round_seconds: str, *, profile: str | None) -> int:
    """`headway serve` with another engine."""
    from headway.engine import EngineConfig
    from headway.server.config import ModelSource, ServerConfig
    from headway.server.engine_client import EngineClient

    engine = [sys.executable, "-P", "-m", "headway_testing.fast_process", round_seconds]
    command = importlib.import_module("headway.server.cli.serve")
    command.EngineClient = partial(EngineClient, command=engine)
    run = partial(command.serve, ServerConfig(port=0), ModelSource(str(MODEL)), EngineConfig(model_path=""))
    if profile is None:
        return run()
    import cProfile

    profiler = cProfile.Profile()
    status = profiler.runcall(run)
    profiler.dump_stats(profile)
    return status


def measure(load: Load, *, profile: str | None) -> Figures:
    command = [sys.executable, "-P", __file__, "--serve-with", str(load.round_seconds)]
    command += ["--profile", profile] if profile else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = wait_for_url(process)
        asyncio.run(run_streams(url, Load(load.streams, 20, load.round_seconds)))  # warms up
        read_sent(process)
        memory = resident_bytes(process.pid)
        with ExitStack() as company:
            for _ in range(load.idle):
                company.enter_context(idle_connection(url))
            before = cpu_seconds(process.pid)
            started = time.monotonic()
            for number in range(load.stalled):
                company.enter_context(stalled_stream(url, load.streams + number, load))
            streams = asyncio.run(run_streams(url, load))
            seconds = time.monotonic() - started
            spent = cpu_seconds(process.pid) - before
            sent = read_sent(process)
            grown = resident_bytes(process.pid) - memory
    finally:
        process.terminate()
        process.communicate(timeout=20)
    num_events = (load.streams + load.stalled) * load.events
    return Figures(
        num_events / spent,
        num_events / seconds,
        sum(map(len, streams)) / (load.streams * load.events),
        latencies(streams, sent, load),
        grown,
    )


def wait_for_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            return match[0]
    raise RuntimeError("the server did not start")


def read_sent(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    """When the engine sent the events of each stream in the burst that has just ended."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith('{"sent"'):
            sent: dict[str, list[float]] = json.loads(line)["sent"]
            return sent
    raise RuntimeError("the engine has not reported")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


# --- the clients -----------------------------------------------------------------------------------------

Piece = tuple[float, int]  # when it came, characters of the text so far


async def run_streams(url: str, load: Load) -> list[list[Piece]]:
    start = asyncio.Event()
    tasks = [asyncio.create_task(read_stream(url, number, load, start)) for number in range(load.streams)]
    start.set()
    return await asyncio.gather(*tasks)


def idle_connection(url: str) -> socket.socket:
    """A connection that was used once."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(f"GET /version HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    assert client.recv(1 << 12)
    return client


def stalled_stream(url: str, number: int, load: Load) -> socket.socket:
    """A client that asks for a stream and reads nothing of it."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    client.sendall(request(address.netloc, number, load))
    return client


def request(host: str, number: int, load: Load) -> bytes:
    num_tokens = TOKENS_PER_EVENT * load.events
    body = json.dumps({"prompt": prompt(number), "max_tokens": num_tokens, "stream": True, "stop": STOP})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body.encode()


async def read_stream(url: str, number: int, load: Load, start: asyncio.Event) -> list[Piece]:
    """A bare socket: an HTTP client would take more time than the server."""
    address = urlsplit(url)
    content = request(address.netloc, number, load)
    await start.wait()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(content)
    pieces: list[Piece] = []
    num_characters = 0
    data = b""
    while b"data: [DONE]" not in data:
        received = await reader.read(1 << 16)
        assert received, f"stream {number} ended early: {data[-300:]!r}"
        now = time.monotonic()
        *lines, data = (data + received).split(b"\n\n")
        for line in lines:
            if (place := line.find(b"data: ")) < 0:
                continue
            if line[place + 6 :] == b"[DONE]":
                data = line
                break
            (choice,) = json.loads(line[place + 6 :])["choices"]
            num_characters += len(choice["text"])
            pieces.append((now, num_characters))
    writer.close()
    return pieces


@cache
def source_ids() -> list[int]:
    text = json.loads((MODEL / "heldout_prompts.json").read_text())[0]["text"]
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def prompt(number: int) -> list[int]:
    """The stream's number, then source code, which the fake engine says again and again."""
    return [number, *source_ids()]


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def latencies(streams: list[list[Piece]], sent: dict[str, list[float]], load: Load) -> tuple[float, float]:
    """From the sending of an event to the reading of its last character, of all streams."""
    ids = prompt(0)[1:]
    decode = tokenizer().decode
    script = [ids[i % len(ids)] for i in range(TOKENS_PER_EVENT * load.events)]
    through = [len(decode(script[: TOKENS_PER_EVENT * n])) for n in range(1, load.events + 1)]
    seconds: list[float] = []
    for number, pieces in enumerate(streams):
        event = 0
        for came, num_characters in pieces:
            while event < load.events and through[event] <= num_characters:
                seconds.append(came - sent[str(number)][event])
                event += 1
    quantiles = statistics.quantiles(seconds, n=100)
    return quantiles[49], quantiles[98]


if __name__ == "__main__":
    sys.exit(main())
