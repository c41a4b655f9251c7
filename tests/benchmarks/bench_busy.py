"""How much of the embedded model's speed is left on a CPU beside one other busy process, by threads and
spinning.

Each setting is a server of its own. Its rate is measured idle and busy in turn, several times over; the
median of each counts. The bars: beside one busy core at least half of the idle rate, and idle at most 10 %
below the best setting.

    .venv/bin/python -P tests/benchmarks/bench_busy.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from headway_testing.daemon import KV_CACHE, Server, start_server, stop_server

LEAST_BUSY_SHARE, LEAST_IDLE_SHARE = 0.5, 0.9
BODY = {"prompt": "def main() -> None:\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
BUSY = "while True: pass"
DEFAULT = "default"
# The flags and the environment of each.
SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    DEFAULT: ((), {}),
    "1 thread": (("--threads", "1"), {}),
    "all cores": (("--threads", str(len(os.sched_getaffinity(0)))), {}),
    "all cores, long spinning": (
        ("--threads", str(len(os.sched_getaffinity(0)))),
        {"GOMP_SPINCOUNT": "30000000000"},
    ),
    "all cores, no spinning": (
        ("--threads", str(len(os.sched_getaffinity(0)))),
        {"OMP_WAIT_POLICY": "passive"},
    ),
}


def main() -> int:
    """Prints the table; the exit status is 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs: int = parser.parse_args().runs
    rates = {name: measure(name, runs) for name in SETTINGS}
    print(f"{'setting':28}{'idle':>10}{'busy':>10}{'busy / idle':>14}")
    for name, (idle, busy) in rates.items():
        print(f"{name:28}{idle:10.0f}{busy:10.0f}{busy / idle:14.2f}")
    idle, busy = rates[DEFAULT]
    best = max(rate for rate, _ in rates.values())
    print(f"default: {busy / idle:.2f} of its idle rate when busy, {idle / best:.2f} of the best idle rate")
    return int(busy / idle < LEAST_BUSY_SHARE or idle / best < LEAST_IDLE_SHARE)


def measure(name: str, runs: int) -> tuple[float, float]:
    """Tokens a second: idle, and beside one process that is always busy."""
    flags, environment = SETTINGS[name]
    cores = str(len(os.sched_getaffinity(0)))
    server = start_server(*KV_CACHE, *flags, environment={"OMP_NUM_THREADS": cores} | environment)
    try:
        rate(server)
        idle, busy = [], []
        for _ in range(runs):
            idle.append(rate(server))
            with subprocess.Popen([sys.executable, "-S", "-c", BUSY]) as other:
                try:
                    busy.append(rate(server))
                finally:
                    other.kill()
        return statistics.median(idle), statistics.median(busy)
    finally:
        stop_server(server)


def rate(server: Server) -> float:
    """Tokens a second of one request."""
    began = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=600).raise_for_status()
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
