"""What the API process costs by itself: a fake engine in a process of its own, 128 streams, 3 tokens an
event.

Everything that `headway serve` does to tokens is on: frames, detokenisation, stop strings, chunks, HTTP. An
engine that sends a round each so many milliseconds sets the load; the processor time of the API process over
the run is what an event costs. Latency is from the engine's sending to a client's reading; readers share one
process.

    make bench-frontend
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from headway_testing.api_process import (
    api_process,
    arrivals,
    cpu_seconds,
    median_and_p99,
    read_sent,
    resident_bytes,
    run_streams,
)
from headway_testing.fast_process import TOKENS_PER_EVENT

BAR_EVENTS_PER_CPU_SECOND = 20_000
WARM_UP_EVENTS = 20


@dataclass(frozen=True)
class Load:
    streams: int
    events: int  # of each stream
    round_seconds: float


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
    loads = [Load(arguments.streams, arguments.events, ms / 1000) for ms in arguments.round_ms]
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
    parser.add_argument("--profile", help="write a cProfile of the API process here (makes it slower)")
    return parser.parse_args()


def measure(load: Load, *, profile: str | None) -> Figures:
    with api_process(load.round_seconds, profile=profile) as (process, url):
        asyncio.run(run_streams(url, load.streams, WARM_UP_EVENTS))
        read_sent(process, load.streams)
        memory = resident_bytes(process.pid)
        before = cpu_seconds(process.pid)
        started = time.monotonic()
        streams = asyncio.run(run_streams(url, load.streams, load.events))
        seconds = time.monotonic() - started
        spent = cpu_seconds(process.pid) - before
        sent = read_sent(process, load.streams)
        grown = resident_bytes(process.pid) - memory
    num_events = load.streams * load.events
    return Figures(
        num_events / spent,
        num_events / seconds,
        sum(map(len, streams)) / num_events,
        median_and_p99([latency for _, latency in arrivals(streams, sent)]),
        grown,
    )


if __name__ == "__main__":
    sys.exit(main())
