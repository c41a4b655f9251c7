"""`headway bench engine`: one engine in this process, without HTTP; every figure with its floor."""

from __future__ import annotations

import logging
import os
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from headway.engine.bench.floor import Ceilings, Costs, costs_of, measured_ceilings
from headway.engine.bench.machine import device_name, versions
from headway.engine.bench.measure import Driver, Rounds
from headway.engine.bench.report import DecodeFigures, LoopFigures, PrefillFigures, Report, keep_json, show
from headway.engine.bench.settings import Settings, read_settings
from headway.engine.build import Engine, assemble
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.loading.headers import outline_of
from headway.engine.models.registry import read_model_spec
from headway.engine.options import draft_maker
from headway.engine.protocol.errors import ConfigError, HeadwayError
from headway.engine.protocol.exit_status import reports

LEAST_REQUESTS, REQUESTS_PER_STREAM = 8, 4  # of a closed loop


@reports(HeadwayError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    import_seconds = _seconds_since_start()
    settings = read_settings(argv, has_gpu=torch.cuda.is_available())
    report = run(settings, shlex.join(["headway", "bench", "engine", *argv]), import_seconds)
    show(report)
    keep_json(report, settings.json)
    return 0


def run(settings: Settings, command: str, import_seconds: float) -> Report:
    """Raises HeadwayError."""
    engine, phases = _start(settings)
    with ExitStack() as taken:
        if engine.ranks is not None:
            taken.callback(engine.ranks.close)
        return _measured(settings, engine, phases, command, import_seconds)


def _measured(
    settings: Settings, engine: Engine, phases: dict[str, float], command: str, import_seconds: float
) -> Report:
    prompts = _prompts(settings)
    startup = {"imports": import_seconds, **phases, "ready": import_seconds + sum(phases.values())}
    driver = Driver(engine, prompts=prompts)
    for depth in set(_depths(settings, driver)) - {engine.info.depth}:
        engine.runner.capture([depth], progress=lambda _: None)
    left_out: list[str] = []
    spec = read_model_spec(settings.engine.model_path)
    make_draft = draft_maker(settings.engine_config(), spec) if engine.info.depth else None
    costs = costs_of(
        outline_of(spec, engine.runner.model.dtype, make_draft, group=engine.runner.model.group),
        draft_lm_head=engine.info.draft_lm_head,
        draft_layers=engine.info.draft_layers,
    )
    model = engine.runner.model
    work = model.work()
    costs = replace(
        costs,
        trunk_bytes=work.active_bytes + model.lm_head.nbytes,
        further_expert_bytes=work.further_expert_bytes,
    )
    peak_at_ready = _peak_memory(engine)
    ceilings = measured_ceilings(engine.runner.device, engine.runner.model.dtype)
    _forget_peak(engine)
    decode = _decode(settings, driver, costs, ceilings, left_out)
    prefill = _prefill(settings, driver, costs, ceilings, left_out)
    loops = _closed_loops(settings, driver, left_out)
    peak = {name: max(size, peak_at_ready[name]) for name, size in _peak_memory(engine).items()}
    return Report(
        command, versions(), device_name(engine), engine.info, startup, ceilings, decode, prefill, loops,
        peak,
        left_out,
    )  # fmt: skip


def _prompts(settings: Settings) -> list[list[int]]:
    """Empty: random tokens. Raises ConfigError."""
    if not settings.has_heldout_prompts:
        return []
    prompts, longest = heldout_prompts(), max(settings.contexts)
    fitting = [prompt for prompt in prompts if len(prompt) >= longest]
    if not fitting:
        limit = max(map(len, prompts))
        raise ConfigError(f"--input-len is {longest}, no held-out prompt has more than {limit} tokens")
    return fitting


def _start(settings: Settings) -> tuple[Engine, dict[str, float]]:
    """Starts the engine as the engine process does. Returns seconds by phase."""
    marks = [time.perf_counter()]

    def progress(share: float) -> None:
        if share == 1.0:
            marks.append(time.perf_counter())

    engine = assemble(settings.engine_config(), progress=progress)
    marks.append(time.perf_counter())
    engine.runner.capture([engine.info.depth], progress=lambda _: None)
    marks.append(time.perf_counter())
    return engine, dict(zip(("load", "memory", "capture"), (b - a for a, b in pairwise(marks)), strict=True))


def _decode(
    settings: Settings, driver: Driver, costs: Costs, ceilings: Ceilings, left_out: list[str]
) -> list[DecodeFigures]:
    lines: list[DecodeFigures] = []
    for input_len in settings.contexts:
        for batch in settings.batches:
            if not driver.can_hold(batch=batch, input_len=input_len, output_len=settings.output_len):
                left_out.append(
                    f"decode of {batch} x {input_len:,}: with {settings.output_len} new tokens each it does not fit"
                )
                continue
            plain: DecodeFigures | None = None
            for depth in _depths(settings, driver):
                _tell(f"decode: batch {batch}, depth {depth}, prompts of {input_len:,}")
                line = _decode_line(settings, driver, costs, ceilings, (batch, depth, input_len), plain)
                plain = line if depth == 0 else plain
                lines.append(line)
    return lines


def _decode_line(
    settings: Settings,
    driver: Driver,
    costs: Costs,
    ceilings: Ceilings,
    case: tuple[int, int, int],
    plain: DecodeFigures | None,
) -> DecodeFigures:
    """case: (batch, depth, tokens of each prompt). plain: the same at depth 0, if that was measured."""
    batch, depth, input_len = case

    def once() -> Rounds:
        return driver.decode(batch=batch, depth=depth, input_len=input_len, output_len=settings.output_len)

    driver.warm_up(batch=batch, depth=depth, input_len=input_len)
    runs = [once() for _ in range(settings.num_runs)]
    milliseconds = [1e3 * run.seconds / run.num_rounds for run in runs]
    rate = statistics.median(run.tokens / run.seconds for run in runs)
    tokens_per_round = sum(run.tokens for run in runs) / sum(run.num_rounds for run in runs) / batch
    context = statistics.mean(run.context for run in runs)
    floor_bytes = costs.round_bytes(batch=batch, depth=depth, context=context)
    return DecodeFigures(
        batch=batch,
        depth=depth,
        input_len=input_len,
        context=context,
        milliseconds=statistics.median(milliseconds),
        all_milliseconds=milliseconds,
        floor_milliseconds=1e3 * floor_bytes / ceilings.read_bytes,
        state_share=costs.moved_state_bytes(batch) / floor_bytes,
        tokens_per_second=rate,
        tokens_per_round=tokens_per_round,
        conversion=None if plain is None else rate / plain.tokens_per_second / tokens_per_round,
    )


def _prefill(
    settings: Settings, driver: Driver, costs: Costs, ceilings: Ceilings, left_out: list[str]
) -> list[PrefillFigures]:
    """Measures prompts at depth 0 and at the greatest depth; the difference is the cost of the draft
    layer."""
    lines: list[PrefillFigures] = []
    depths = _depths(settings, driver)
    for num_prompts, length in settings.prefill:
        if not driver.can_hold(batch=num_prompts, input_len=length, output_len=1):
            left_out.append(f"prefill of {num_prompts} x {length:,}: it does not fit")
            continue
        _tell(f"prefill: {num_prompts} x {length:,}, depths {depths[0]} and {depths[-1]}")
        flop = costs.prefill_flop(num_prompts=num_prompts, length=length)
        size = {"num_prompts": num_prompts, "length": length}
        for depth, seconds in _prefills_in_turns(
            settings, driver, sorted({depths[0], depths[-1]}), size
        ).items():
            lines.append(
                PrefillFigures(
                    **size,
                    depth=depth,
                    milliseconds=1e3 * statistics.median(seconds),
                    all_milliseconds=[1e3 * one for one in seconds],
                    floor_milliseconds=1e3 * flop / ceilings.matmul_flop,
                    tokens_per_second=num_prompts * length / statistics.median(seconds),
                )
            )
    return lines


def _prefills_in_turns(
    settings: Settings, driver: Driver, depths: list[int], size: dict[str, int]
) -> dict[int, list[float]]:
    """Seconds by depth. One of each a turn: a GPU is slower after a tenth of a second of such work than
    before."""
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    for turn in range(1 + settings.num_runs):
        for depth in depths:
            one = driver.prefill_seconds(**size, depth=depth)
            if turn > 0:  # the first compiles kernels and warms up
                seconds[depth].append(one)
    return seconds


def _closed_loops(settings: Settings, driver: Driver, left_out: list[str]) -> list[LoopFigures]:
    """Runs closed loops with the number of requests that `headway bench serve` sends."""
    lines: list[LoopFigures] = []
    lengths = {"input_len": settings.contexts[0], "output_len": settings.output_len}
    for num_streams in settings.closed_loop:
        if not driver.can_hold(batch=num_streams, **lengths):
            left_out.append(f"closed loop of {num_streams}: it does not fit")
            continue
        for depth in _depths(settings, driver):
            _tell(f"closed loop: {num_streams} streams, depth {depth}")
            driver.warm_up(batch=num_streams, depth=depth, input_len=settings.contexts[0])
            num_requests = max(LEAST_REQUESTS, REQUESTS_PER_STREAM * num_streams)
            rates = [
                driver.closed_loop(num_streams=num_streams, depth=depth, num_requests=num_requests, **lengths)
                for _ in range(settings.num_runs)
            ]
            lines.append(
                LoopFigures(
                    num_streams,
                    depth,
                    **lengths,
                    tokens_per_second=statistics.median(rates),
                    all_tokens_per_second=rates,
                )
            )
    return lines


def _depths(settings: Settings, driver: Driver) -> list[int]:
    """Rising. A model without a draft head has depth 0 only."""
    return sorted({min(depth, driver.engine.info.depth) for depth in settings.depths})


def _peak_memory(engine: Engine) -> dict[str, int]:
    """This process's greatest, and the device's allocated and reserved ones."""
    peak = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if engine.runner.device.type == "cuda":
        peak["allocated"] = torch.cuda.max_memory_allocated(engine.runner.device)
        peak["reserved"] = torch.cuda.max_memory_reserved(engine.runner.device)
    return peak


def _forget_peak(engine: Engine) -> None:
    """Frees the memory of the ceiling measurements and resets the peak, which is then the engine's alone."""
    if engine.runner.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.runner.device)


def _seconds_since_start() -> float:
    """Returns the seconds since this process was started, including the interpreter's start and all imports;
    0 if they are unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = int(fields[19])  # field 22: after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
