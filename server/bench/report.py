"""Prints the figures of a run, and writes them to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.server.bench.figures import Figures, Level
from headway.server.bench.interference import Interference

TABLE_WIDTH = 200
BUSY_SHARE = 0.8


def show(levels: Sequence[Figures]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    names = (
        "load", "requests", "tokens/s", "of the engine's", "TTFT ms", "TPOT ms", "chunk gap ms", "tokens a round",
        "conversion", "errors",
    )  # fmt: skip
    table = Table(caption="latencies: p50 / p90 / p99, of gaps also p99.9")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for level in levels:
        length = level.engine_acceptance_length or level.acceptance_length
        table.add_row(
            level.level,
            f"{level.num_requests}",
            f"{level.tokens_per_second:,.0f}",
            "" if level.share_of_engine is None else f"{level.share_of_engine:.0%}",
            _joined(level.time_to_first_token, 0),
            _joined(level.time_per_output_token, 2),
            _joined(level.chunk_gap, 1),
            "" if length is None else f"{length:.2f}",
            "" if level.conversion is None else f"{level.conversion:.2f}",
            ", ".join(f"{count} x {kind}" for kind, count in level.errors.items()) or "0",
        )
    console.print(table)
    for level in levels:
        busy = " (too busy: raise --workers)" if level.client_cpu_share > BUSY_SHARE else ""
        shares = ", ".join(f"{share:.2f}" for share in level.acceptance_per_position)
        by_position = f"; acceptance by position {shares}" if shares else ""
        console.print(
            f"{level.level}: client {level.num_workers} processes, the busiest at {level.client_cpu_share:.0%} "
            f"of a core{busy}{by_position}"
        )


def show_interference(interferences: Sequence[Interference]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for line in interferences:
        rates = (line.tokens_per_second_alone, line.tokens_per_second)
        alone, beside = ("none" if rate is None else f"{rate:,.0f} tokens/s" for rate in rates)
        errors = "".join(f", {count} x {kind}" for kind, count in line.errors.items())
        console.print(
            f"{line.level} and {line.num_prompts} prompts of {line.prompt_len:,} tokens, one every "
            f"{line.every_seconds:g} s: p99 chunk gap {_ratio(line.chunk_gap_ratio)} times the undisturbed one; "
            f"prefill {alone} alone, {beside} beside the streams, a share of {_ratio(line.prefill_share)}{errors}"
        )


def write(
    file: Path, head: dict[str, Any], levels: Sequence[Figures], interferences: Sequence[Interference] = ()
) -> None:
    content = head | {"levels": [asdict(level) for level in levels]}
    if interferences:
        content["interference"] = [asdict(line) for line in interferences]
    file.write_text(json.dumps(content, indent=2) + "\n")


def plain_milliseconds(text: str) -> dict[str, float]:
    """Returns {level: median time per output token} of a file by `write`, for levels that have one. Raises
    ValueError, KeyError, TypeError."""
    times = {level["level"]: level["time_per_output_token"] for level in json.loads(text)["levels"]}
    return {level: time["p50"] for level, time in times.items() if time}


def engine_rates(text: str, wanted: Mapping[str, object]) -> dict[str, float]:
    """Returns {level: tokens a second} of those closed loops that `headway bench engine --closed-loop`
    wrote and that have the wanted values. Raises ValueError, KeyError, TypeError."""
    lines = [line for line in json.loads(text)["closed_loop"] if wanted.items() <= line.items()]
    return {str(Level(line["num_streams"], None)): line["tokens_per_second"] for line in lines}


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _joined(values: dict[str, float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values.values())
