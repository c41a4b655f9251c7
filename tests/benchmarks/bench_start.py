"""Seconds from the start of `headway serve` until it is ready, with an empty cache of compiled kernels and
with a full one, and which kernels its own process compiles.

Each pair of starts has a cache folder of its own; the weights of shapes are random. A commit's start is
measured by the `src` folder of its checkout on PYTHONPATH; with --before another commit takes turns with it
on the same machine, and the ratios of the medians are told.

    PYTHONPATH=$PWD/src python -P tests/benchmarks/bench_start.py --pairs 3 --before ../other/src mimo-7b
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

EMBEDDED = "embedded"
# Of the log: phases, what worker processes compiled, and each kernel that the engine itself compiled.
TOLD = re.compile("compiled|rehears|captured| took ")
LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures cold and warm starts of headway serve.")
    parser.add_argument("shape", help=f"a name that headway bench shape knows, or {EMBEDDED}")
    parser.add_argument("--pairs", type=int, default=1, help="cold and warm starts, each")
    parser.add_argument("--before", metavar="SRC", help="the src folder of another commit, which takes turns")
    parser.add_argument("options", nargs="*", help="of headway serve, after --")
    arguments = parser.parse_args(argv)
    sources = {"before": arguments.before, "after": None} if arguments.before else {"after": None}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.pairs):
        for commit, source in sources.items():
            with tempfile.TemporaryDirectory() as folder:
                model = model_arguments(arguments.shape, Path(folder) / "model")
                for name in ("cold", "warm"):
                    seconds, told = start([*model, *arguments.options], Path(folder) / "triton", source)
                    found.setdefault((name, commit), []).append(seconds)
                    print(f"{name}, {commit}: ready after {seconds:.1f} s; {told}", flush=True)
    if arguments.before:
        for name in ("cold", "warm"):
            before, after = (statistics.median(found[name, commit]) for commit in sources)
            print(f"{name}: {after:.1f} s, {after / before:.2f} of {before:.1f} s")
    return 0


def model_arguments(shape: str, folder: Path) -> list[str]:
    """Returns the arguments of headway serve; writes the folder of a shape."""
    if shape == EMBEDDED:
        return []
    command = [sys.executable, "-P", "-m", "headway", "bench", "shape", shape, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [str(folder), "--load-format", "dummy"]


def start(arguments: Sequence[str], cache: Path, source: str | None) -> tuple[float, str]:
    """(seconds until /ready answers 200, what the log says of phases and of compiled kernels)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [sys.executable, "-P", "-m", "headway", "serve", *arguments, "--log-level", "debug"]
    path = {} if source is None else {"PYTHONPATH": source}
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        server = subprocess.Popen(
            [*serve, "--port", str(port)],
            env=os.environ | path | {"TRITON_CACHE_DIR": str(cache)},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_ready(server, f"http://127.0.0.1:{port}/ready", started + LIMIT_SECONDS)
            seconds = time.monotonic() - started
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
            log.seek(0)
            lines = log.read().splitlines()
    return seconds, "".join(f"\n    {line}" for line in lines if TOLD.search(line))


def wait_until_ready(server: subprocess.Popen[bytes], url: str, until: float) -> None:
    """Raises RuntimeError where the server ends or the time is over."""
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server was not ready (exit status {server.poll()})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
