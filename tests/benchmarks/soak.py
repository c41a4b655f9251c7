"""Twenty thousand short requests of every kind against one server, a fifth left by their clients.

Starts `headway serve` with the embedded model, and leaves with status 1 unless all is as headway_testing.soak
wants it: no 5xx, blocks and rows free, memory flat over the last half, drafts as right at the end as at the
beginning. The KV cache is small, so that all of its blocks hold prefixes after the first stretch, and are
evicted from then on. Rounds that a GPU captures late may take what those captured before the first stretch
take. Flags after -- go to the server.

    make soak
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from headway_testing.daemon import Server, start_server, stop_server
from headway_testing.soak import (
    NUM_STRETCHES,
    SERVER_ENVIRONMENT,
    SERVER_FLAGS,
    Check,
    Stretch,
    acceptance_length,
    bring_up,
    checks_of,
    soak,
)

MEBIBYTE = 1 << 20


def main() -> int:
    arguments, flags = _arguments()
    server = start_server(*SERVER_FLAGS, *flags, environment=SERVER_ENVIRONMENT)
    try:
        graph_bytes = bring_up(server, concurrency=arguments.concurrency)
        if graph_bytes:
            print(f"MiB of the engine process for each kind of round: {graph_bytes / MEBIBYTE:.2f}")
        stretches = _run(server, arguments)
    finally:
        status = stop_server(server)
    checks = [
        *checks_of(stretches, graph_bytes),
        Check("status of the server that was told to leave", status, 0),
    ]
    for check in checks:
        print(
            f"{'met   ' if check.is_met else 'MISSED'} {check.name}: {check.found:g}, at most {check.limit:g}"
        )
    if arguments.json is not None:
        content = {
            "graph_bytes": graph_bytes,
            "stretches": [asdict(stretch) for stretch in stretches],
            "checks": [asdict(check) | {"is_met": check.is_met} for check in checks],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(not all(check.is_met for check in checks))


def _run(server: Server, arguments: argparse.Namespace) -> list[Stretch]:
    stretches: list[Stretch] = []
    started = time.monotonic()
    with closing(
        soak(
            server,
            num_requests=arguments.requests,
            concurrency=arguments.concurrency,
            num_processes=arguments.processes,
        )
    ) as running:
        for stretch in running:
            stretches.append(stretch)
            print(_line(stretch, len(stretches), time.monotonic() - started), flush=True)
    return stretches


def _line(stretch: Stretch, number: int, seconds: float) -> str:
    sizes = {
        "API": stretch.api_bytes, "engine": stretch.engine_bytes, "of it files": stretch.engine_file_bytes,
        "GPU": stretch.device_bytes,
    }  # fmt: skip
    memory = ", ".join(f"{name} {size / MEBIBYTE:,.1f}" for name, size in sizes.items() if size is not None)
    if stretch.device_bytes is not None:
        memory += f"; {stretch.num_rounds_launched:g} new kinds of rounds"
    outcomes = ", ".join(f"{count} x {kind}" for kind, count in stretch.outcomes.items())
    return (
        f"{number}/{NUM_STRETCHES} after {seconds:.0f} s: {outcomes}; {stretch.num_aborted:g} aborted; "
        f"acceptance length {acceptance_length([stretch.rounds]):.4f}, of the probe "
        f"{acceptance_length([stretch.probe]):.4f}; MiB: {memory}"
    )


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    own, separator, flags = sys.argv[1:], "--", []
    if separator in own:
        place = own.index(separator)
        own, flags = own[:place], own[place + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="(default: 20000)")
    parser.add_argument("--concurrency", type=int, default=128, help="(default: 128)")
    parser.add_argument(
        "--processes", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)),
        help="of clients (default: half the cores, at most 8)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args(own), flags


if __name__ == "__main__":
    sys.exit(main())
