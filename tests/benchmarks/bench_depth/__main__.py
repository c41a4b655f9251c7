"""`make bench-depth`: the depth that is chosen for each round, against every fixed depth, cell by cell."""

from __future__ import annotations

import gc
import logging
import shlex
import sys
import time
from collections.abc import Sequence

import torch

from bench_depth.measure import Cell, CellMeter
from bench_depth.profiles import STATIONARY, rates_of
from bench_depth.report import Report, show, summarize
from bench_depth.settings import Settings, read_settings
from headway.engine.bench.machine import device_name, versions
from headway.engine.bench.report import keep_json
from headway.engine.build import Engine, assemble
from headway.engine.protocol.errors import HeadwayError


def main(argv: Sequence[str]) -> int:
    """Returns the exit status, 0 also where bars are missed; faults of the user's or the world's are one line
    on stderr."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = read_settings(argv, has_gpu=torch.cuda.is_available())
        report = run(settings, shlex.join(["bench_depth", *argv]))
        show(report)
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(settings: Settings, command: str) -> Report:
    """Returns the report, which is written to the JSON file after each cell. Raises HeadwayError."""
    engine = _start(settings)
    meter, began = CellMeter(engine, settings), time.monotonic()
    cells: list[Cell] = []
    left_out: list[str] = []

    def report() -> Report:
        return Report(
            command,
            versions(),
            device_name(engine),
            engine.info,
            {name: rates_of(name, engine.info.depth) for name in STATIONARY},
            time.monotonic() - began,
            cells,
            summarize(cells),
            left_out,
        )

    grid = [(streams, input_len) for input_len in settings.contexts for streams in settings.streams]
    fitting = [cell for cell in grid if meter.can_hold(*cell)]
    for streams, input_len in (cell for cell in grid if cell not in fitting):
        left_out.append(
            f"{streams} x {input_len:,}: with {settings.output_len} new tokens each it does not fit"
        )
    num_cells = len(fitting) * len(settings.profiles)
    for streams, input_len in fitting:
        _tell(f"{streams} x {input_len:,}: prompts")
        meter.warm_up(streams, input_len)
        for profile in settings.profiles:
            cells.append(meter.measure(streams, input_len, profile))
            left = (time.monotonic() - began) / len(cells) * (num_cells - len(cells))
            _tell(f"{_line(cells[-1])}; {len(cells)} of {num_cells}, about {left:.0f} s left")
            keep_json(report(), settings.json)
    whole = report()
    keep_json(whole, settings.json)
    return whole


def _start(settings: Settings) -> Engine:
    engine = assemble(settings.engine_config(), progress=lambda _: None)
    engine.runner.capture(range(engine.info.depth + 1), progress=lambda _: None)
    # As in the engine's process: a full collection would stop a cell for some 50 ms.
    gc.collect()
    gc.freeze()
    return engine


def _line(cell: Cell) -> str:
    fixed = ", ".join(
        f"depth {depth} {speed.tokens_per_second:,.0f}" for depth, speed in enumerate(cell.fixed)
    )
    return (
        f"{cell.name}: tokens/s auto {cell.auto.tokens_per_second:,.0f} at a mean depth of {cell.mean_depth:.2f}, {fixed}; auto / best {cell.over_best:.3f}, "
        f"auto / depth 0 {cell.over_depth_0:.3f}"
    )


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
