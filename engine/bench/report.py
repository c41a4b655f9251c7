"""The figures of a run, each with its floor, and their printed form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from headway.engine.bench.floor import Ceilings
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.messages import EngineInfo

TABLE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """The figures of decode rounds. milliseconds: the median of a round; all_milliseconds: those of each run.
    tokens_per_round: the average tokens of a row.

    conversion: speed-up over depth 0 at the same batch and prompt, over tokens_per_round; None without a
    depth 0. state_share: the share of the floor for reading and writing recurrent state.
    """

    batch: int
    depth: int
    input_len: int
    context: float
    milliseconds: float
    all_milliseconds: list[float]
    floor_milliseconds: float
    state_share: float
    tokens_per_second: float
    tokens_per_round: float
    conversion: float | None


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """The figures of prefills. milliseconds: the median time from the prompts' arrival to the last one's
    first token."""

    num_prompts: int
    length: int
    depth: int
    milliseconds: float
    all_milliseconds: list[float]
    floor_milliseconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """A closed loop without HTTP, prompts included; the median of all_tokens_per_second."""

    num_streams: int
    depth: int
    input_len: int
    output_len: int
    tokens_per_second: float
    all_tokens_per_second: list[float]


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of a run. startup_seconds: those of each phase, in order. left_out: the measurements that
    did not fit."""

    command: str
    versions: dict[str, str]
    device_name: str
    engine: EngineInfo
    startup_seconds: dict[str, float]
    ceilings: Ceilings
    decode: list[DecodeFigures]
    prefill: list[PrefillFigures]
    closed_loop: list[LoopFigures]
    peak_memory_bytes: dict[str, int]
    left_out: list[str]


def keep_json(report: object, file: Path | None) -> None:
    """Writes the report to the file, if there is one. Raises ConfigError."""
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    except OSError as error:
        raise ConfigError(f"--json is {file}, which cannot be written: {error}") from None


def new_console(width: int = TABLE_WIDTH) -> Console:
    """Returns a terminal, or a file of lines that are wide enough for the tables. width: in characters."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = width
    return console


def show(report: Report) -> None:
    console = new_console()
    info = report.engine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.command}\n{report.device_name}, {versions}")
    console.print(
        f"{info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters, {info.dtype}; "
        f"read {report.ceilings.read_bytes / 1e9:,.0f} GB/s, "
        f"matrix product {report.ceilings.matmul_flop / 1e12:,.2f} TFLOP/s, both measured in this run"
    )
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.startup_seconds.items())
    console.print(f"start-up in seconds: {phases}")
    memory = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in report.peak_memory_bytes.items())
    console.print(f"peak memory: {memory}")
    if info.has_dummy_weights or info.synthetic_acceptance is not None:
        console.print("random weights or synthetic acceptance: the text means nothing")
    if report.decode:
        console.print(_decode_table(report.decode))
    if report.prefill:
        console.print(_prefill_table(report.prefill))
    if report.closed_loop:
        console.print(_loop_table(report.closed_loop))
    for reason in report.left_out:
        console.print(f"left out: {reason}")


def _decode_table(lines: list[DecodeFigures]) -> Table:
    table = new_table(
        "batch", "depth", "prompt", "ms a round", "floor", "of it state", "share", "tokens/s", "tokens a round", "conversion"
    )  # fmt: skip
    for line in lines:
        table.add_row(
            f"{line.batch}",
            f"{line.depth}",
            f"{line.input_len:,}",
            f"{line.milliseconds:.3f}",
            f"{line.floor_milliseconds:.3f}",
            f"{line.state_share:.0%}" if line.state_share else "",
            f"{line.floor_milliseconds / line.milliseconds:.0%}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.tokens_per_round:.2f}",
            "" if line.conversion is None or line.depth == 0 else f"{line.conversion:.2f}",
        )
    return table


def _prefill_table(lines: list[PrefillFigures]) -> Table:
    table = new_table("prefill", "depth", "ms", "floor", "share", "tokens/s")
    for line in lines:
        table.add_row(
            f"{line.num_prompts} x {line.length:,}",
            f"{line.depth}",
            f"{line.milliseconds:.1f}",
            f"{line.floor_milliseconds:.1f}",
            f"{line.floor_milliseconds / line.milliseconds:.0%}",
            f"{line.tokens_per_second:,.0f}",
        )
    return table


def _loop_table(lines: list[LoopFigures]) -> Table:
    table = new_table("closed loop", "depth", "prompt", "new tokens", "tokens/s")
    for line in lines:
        cells = (line.num_streams, line.depth, line.input_len, line.output_len, line.tokens_per_second)
        table.add_row(*(f"{cell:,.0f}" for cell in cells))
    return table


def new_table(*columns: str) -> Table:
    """Returns a table of numbers."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
