"""Seconds from the start of `headway serve` until it is ready, with an empty cache of compiled kernels and
with a full one.

Each pair of starts has a cache folder of its own; weights are random. A commit's start is measured by the
`src` folder of its checkout on PYTHONPATH, so that two commits can take turns on one card.

    PYTHONPATH=$PWD/src python -P tests/benchmarks/bench_start.py mimo-7b --pairs 2
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures cold and warm starts of headway serve.")
    parser.add_argument("shape", help="a name that headway bench shape knows")
    parser.add_argument("--pairs", type=int, default=1, help="cold and warm starts, each")
    parser.add_argument("options", nargs="*", help="of headway serve, after --")
    arguments = parser.parse_args(argv)
    for _ in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            shape = [sys.executable, "-P", "-m", "headway", "bench", "shape", arguments.shape, str(model)]
            subprocess.run(shape, check=True, stdout=subprocess.DEVNULL)
            for name in ("cold", "warm"):
                seconds, compiled = start(model, Path(folder) / "triton", arguments.options)
                print(
                    f"{name}: ready after {seconds:.1f} s; {compiled or 'nothing was compiled ahead'}",
                    flush=True,
                )
    return 0


def start(model: Path, cache: Path, options: Sequence[str]) -> tuple[float, str]:
    """(seconds until /ready answers 200, what the log says of compiled kernels)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [sys.executable, "-P", "-m", "headway", "serve", str(model), "--load-format", "dummy"]
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        server = subprocess.Popen(
            [*serve, "--port", str(port), *options],
            env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
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
    return seconds, "; ".join(line for line in lines if "compiled" in line or "rehears" in line)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, until: float) -> None:
    """Raises RuntimeError where the server ends or the time is over."""
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server was not ready (exit status {server.poll()})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
