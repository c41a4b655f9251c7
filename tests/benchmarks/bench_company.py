"""Whether clients that do nothing slow the others: idle connections, and readers that have stopped reading.

One API process, 128 streams that are read all the time, a load well below what it could bear. Beside them, by
turns (A B B A), there is no company or there is some: 1,000 idle kept connections, and 200 streams of which
nobody reads a byte and whose buffers are full. What the others cost and how long they wait is compared within
pairs of neighbouring phases, since a machine's speed drifts by more than is looked for; the median of the
ratios is shown with its 95 % interval (of ranks: no shape is assumed).

A stream has its share of the engine's events whether it is read or not, as any further request has. So there
are two questions. "at rest": the engine has ended the stalled streams, their answers wait to be read;
compared with nobody there. "running": the engine goes on for them; compared with as many streams that are
read.

    make bench-frontend
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path.append(str(SUPPORT))
from headway_testing.api_process import (
    Process,
    Stream,
    api_process,
    arrivals,
    cpu_seconds,
    median_and_p99,
    read_sent,
    request,
    resident_bytes,
    source_ids,
    tokenizer,
)
from headway_testing.fast_process import (
    FILLING,
    FILLING_EVENTS,
    FILLING_TOKENS,
)

BAR_RATIO = 1.05
ENDLESS_TOKENS = 900_000
LONG_TOKEN = "#" * 32  # what stalled streams are filled with
Kind = Literal["none", "idle", "stalled", "idle and stalled", "read"]


@dataclass(frozen=True)
class Comparison:
    """Two companies. lasts: their streams go on to be given tokens."""

    name: str
    kinds: tuple[Kind, Kind]
    round_seconds: float
    lasts: bool


COMPARISONS = (
    Comparison("at rest", ("none", "idle and stalled"), 0.020, lasts=False),
    Comparison("running", ("read", "stalled"), 0.050, lasts=True),
)


@dataclass(frozen=True)
class Phase:
    which: int  # 0 or 1: of the comparison's two
    start_seconds: float
    end_seconds: float
    cpu_seconds: float  # of the API process


def main() -> int:
    """Prints the figures; the exit status is 1 when others surely lose more than 5 %."""
    arguments = parse_arguments()
    if arguments.keep_company:
        return keep_company(arguments.keep_company)
    worst = 0.0
    for comparison in COMPARISONS:
        if arguments.only in (None, comparison.name):
            worst = max(worst, asyncio.run(compare(comparison, arguments)))
    if arguments.only in (None, "memory"):
        show_memory(arguments)
    return int(worst > BAR_RATIO)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--idle", type=int, default=1000, help="kept connections that ask nothing")
    parser.add_argument("--stalled", type=int, default=200, help="streams that nobody reads")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--phase-seconds", type=float, default=3.0)
    parser.add_argument("--settle-seconds", type=float, default=1.0, help="before each phase")
    parser.add_argument("--only", choices=[*(c.name for c in COMPARISONS), "memory"])
    parser.add_argument("--keep-company", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the measurement -------------------------------------------------------------------------------------


async def compare(comparison: Comparison, arguments: argparse.Namespace) -> float:
    """The lower bound of the worst ratio."""
    with api_process(comparison.round_seconds) as (process, url), company(url) as friends:
        streams = [
            Stream(number, request(url, [number, *source_ids()], ENDLESS_TOKENS))
            for number in range(arguments.streams)
        ]
        reading = [asyncio.create_task(stream.read(url)) for stream in streams]
        await asyncio.sleep(2.0)
        phases = []
        now: Kind = "none"
        for pair in range(arguments.pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                kind = comparison.kinds[which]
                if kind != now:
                    await asyncio.to_thread(friends.become, kind, arguments, lasts=comparison.lasts)
                    num_lasting = arguments.stalled if comparison.lasts and kind != "none" else 0
                    await asyncio.to_thread(wait_for_rest, url, arguments.streams + num_lasting)
                    await asyncio.sleep(2 * FILLING_EVENTS * comparison.round_seconds)
                    now = kind
                await asyncio.sleep(arguments.settle_seconds)
                assert not any(task.done() for task in reading), "a stream has ended"
                phases.append(await measure(process, which, arguments.phase_seconds))
                assert friends.are_there()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await asyncio.to_thread(friends.become, "none", arguments, lasts=False)
        sent = await asyncio.to_thread(read_sent, process)
    print(f"{comparison.name}: {comparison.kinds[1]} against {comparison.kinds[0]}, {arguments.pairs} pairs")
    return show_ratios(phases, sorted(arrivals([stream.pieces for stream in streams], sent)))


async def measure(process: Process, which: int, seconds: float) -> Phase:
    start, cpu = time.monotonic(), cpu_seconds(process.pid)
    await asyncio.sleep(seconds)
    end, cpu = time.monotonic(), cpu_seconds(process.pid) - cpu
    return Phase(which, start, end, cpu)


def wait_for_rest(url: str, num_rows: int) -> None:
    """Until the engine runs so many. Its snapshots come in line with its events: those before are done
    with."""
    while True:
        time.sleep(0.2)
        with urllib.request.urlopen(f"{url}/load") as answer:
            if json.load(answer)["num_rows_running"] == num_rows:
                return


def show_memory(arguments: argparse.Namespace) -> None:
    """Resident, of the API process, as one company after another comes, stays and goes."""
    with api_process(COMPARISONS[0].round_seconds) as (process, url), company(url) as friends:
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would hold the engine

        def visit(kind: Kind) -> str:
            friends.become(kind, arguments, lasts=False)
            time.sleep(0.5)
            wait_for_rest(url, 0)
            sizes = []
            for _ in range(2):
                time.sleep(arguments.phase_seconds / 2)
                sizes.append(resident_bytes(process.pid) / 2**20)
            return f"{kind} {sizes[0]:.1f}, {sizes[1]:.1f}"

        kinds: tuple[Kind, ...] = ("none", "idle", "none", "stalled")
        print(f"memory, MiB, soon and {arguments.phase_seconds / 2:g} s later:")
        for _ in range(3):
            print("  " + "; ".join(map(visit, kinds)))
        print("  " + visit("none"))


def show_ratios(phases: Sequence[Phase], events: Sequence[tuple[float, float]]) -> float:
    """Higher is worse, of all ratios. Returns the worst lower bound."""
    figures = [figures_of(phase, events) for phase in phases]
    worst = 0.0
    for name in figures[0]:
        pairs = [
            (figures[i][name], figures[i + 1][name])
            if phases[i].which == 0
            else (figures[i + 1][name], figures[i][name])
            for i in range(0, len(figures), 2)
        ]
        without, beside = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio, low, high = median_with_interval([b / a for a, b in pairs])
        worst = max(worst, low)
        print(f"  {name:38} {without:8.3f} {beside:8.3f}   ratio {ratio:.3f} ({low:.3f} to {high:.3f})")
    return worst


def figures_of(phase: Phase, events: Sequence[tuple[float, float]]) -> dict[str, float]:
    """events: of the others, when each was sent and how long it took to be read."""
    latencies = [seconds for sent, seconds in events if phase.start_seconds <= sent < phase.end_seconds]
    median, p99 = median_and_p99(latencies)
    seconds = phase.end_seconds - phase.start_seconds
    return {
        "milliseconds between events, of all": 1e3 * seconds / len(latencies),
        "CPU microseconds of the API an event": 1e6 * phase.cpu_seconds / len(latencies),
        "latency median, ms": 1e3 * median,
        "latency p99, ms": 1e3 * p99,
    }


def median_with_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The interval between ranks that the median misses in at most one of twenty samples (the sign test)."""
    ordered = sorted(ratios)
    chances = [2 * below(len(ordered), k) for k in range(len(ordered) // 2)]
    rank = max((k for k, chance in enumerate(chances) if chance <= 0.05), default=0)
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def below(n: int, k: int) -> float:
    """The chance of at most k heads in n throws of a coin."""
    return sum(math.comb(n, i) for i in range(k + 1)) / 2**n


# --- the company, in a process of its own ----------------------------------------------------------------


class Friends:
    """The process that keeps company, told by lines. Mutable: what it is."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def become(self, kind: Kind, arguments: argparse.Namespace, *, lasts: bool) -> None:
        """Returns when it has asked for everything."""
        num_idle = arguments.idle if "idle" in kind else 0
        num_streams = 0 if kind in ("none", "idle") else arguments.stalled
        num_tokens = ENDLESS_TOKENS if lasts else FILLING_EVENTS * FILLING_TOKENS
        self._ask(f"{num_idle} {num_streams} {num_tokens} {int(kind == 'read')}")

    def are_there(self) -> bool:
        return self._ask("still there?") == "yes"

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@contextmanager
def company(url: str) -> Iterator[Friends]:
    command = [sys.executable, "-P", __file__, "--keep-company", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Friends(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=20)


def keep_company(url: str) -> int:
    """Obeys lines on stdin; between them it sleeps, or reads what comes for those that are to be read."""
    idle: list[socket.socket] = []
    streams: list[socket.socket] = []
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(1 << 16)
                continue
            line = sys.stdin.readline()
            if line.startswith("still"):
                print("yes" if all(map(is_open, idle)) else "no", flush=True)
                continue
            for connection in (*idle, *streams):
                with suppress(KeyError):
                    selector.unregister(connection)
                connection.close()
            if not line:
                return 0
            num_idle, num_streams, num_tokens, are_read = map(int, line.split())
            idle = [idle_connection(url) for _ in range(num_idle)]
            streams = [stream(url, n, num_tokens) for n in range(num_streams)]
            if are_read:
                for connection in streams:
                    selector.register(connection, selectors.EVENT_READ)
            print("done", flush=True)


def idle_connection(url: str) -> socket.socket:
    """A connection that was used once."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(f"GET /version HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    while b"}" not in connection.recv(1 << 12):
        pass
    return connection


def is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


def stream(url: str, number: int, num_tokens: int) -> socket.socket:
    """A stream that begins by filling its buffers."""
    address = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.connect((address.hostname, address.port))
    long = tokenizer().token_to_id(LONG_TOKEN)
    connection.sendall(request(url, [FILLING + number, long], num_tokens))
    return connection


if __name__ == "__main__":
    sys.exit(main())
