"""Settings of `make bench-depth`: its flags, and the engine that they select."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench_depth.profiles import ALTERNATING, PROFILES, STATIONARY, rates_of
from headway.engine.bench.measure import least_new_tokens, unread_tokens
from headway.engine.bench.settings import (
    add_engine_flags,
    add_model_flags,
    check_json,
    common_config,
    parse_number,
    parse_numbers,
)
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import MAX_DEPTH, EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.speculation.select import drafter_name


@dataclass(frozen=True, slots=True)
class Settings:
    """contexts: tokens of each prompt. seconds: of each measurement, and of each spell of a fixed depth;
    warm_up_seconds: of the policy in a profile before it is measured; switch_seconds: of each spell of the
    policy where profiles switch. num_runs: of each setting in a stationary profile, num_periods: where
    profiles switch. output_len: tokens after which the rows start anew. engine: see `common_config`."""

    engine: EngineConfig
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    profiles: tuple[str, ...]
    max_depth: int
    seconds: float
    warm_up_seconds: float
    switch_seconds: float
    num_runs: int
    num_periods: int
    output_len: int
    json: Path | None

    def engine_config(self) -> EngineConfig:
        """One engine for the whole grid; prompts that were computed once are found in its prefix cache.
        Raises ConfigError."""
        model = read_model_spec(self.engine.model_path)
        wanted = max(self.contexts) + self.output_len + unread_tokens(self.max_depth)
        config = msgspec.structs.replace(
            self.engine,
            depth=self.max_depth,
            chooses_depth=True,
            max_model_len=min(model.max_position_embeddings, wanted),
            max_running=max(self.streams),
            max_waiting=max(self.streams),
            synthetic_acceptance=rates_of(next(iter(STATIONARY)), self.max_depth),
        )
        if drafter_name(config, has_head=model.draft_head is not None) == "none":
            raise ConfigError(
                f"MODEL is {self.engine.model_path}, which has no MTP head that could draft; name a model with one"
            )
        return config


def read_settings(argv: Sequence[str], *, has_gpu: bool) -> Settings:
    """Raises ConfigError; --help and flags that do not exist leave as argparse does."""
    given = _parser().parse_args(argv)
    check_json(given.json)
    if given.max_depth > MAX_DEPTH:
        raise ConfigError(f"--max-depth is {given.max_depth}, it must be 1 to {MAX_DEPTH}")
    least = least_new_tokens(given.max_depth)
    if given.output_len < least:
        raise ConfigError(
            f"--output-len is {given.output_len}, too few to time a round of up to {given.max_depth} drafts; set {least} or more"
        )
    is_cpu = given.device == "cpu" or not has_gpu
    return Settings(
        engine=common_config(given),
        streams=given.streams or ((1, 4) if is_cpu else (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        contexts=given.contexts or ((128,) if is_cpu else (128, 2_048, 16_384)),
        profiles=given.profiles,
        max_depth=given.max_depth,
        seconds=given.seconds,
        warm_up_seconds=given.warm_up_seconds,
        switch_seconds=given.switch_seconds,
        num_runs=given.runs,
        num_periods=given.periods,
        output_len=given.output_len,
        json=given.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_depth",
        description="Compares the depth that the policy chooses for each round with every fixed depth, by tokens a second, over a "
        "grid of streams, prompt lengths and acceptance profiles, in one engine. Drafts are accepted at set rates, so that the "
        "text means nothing.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add_model_flags(parser)
    add("--streams", type=parse_numbers(1), metavar="N,N", help="rows that decode at once (default: 1,2,4,8,16,32,64,128,256; on "
        "a CPU 1,4)")  # fmt: skip
    add(
        "--contexts",
        type=parse_numbers(1),
        metavar="N,N",
        help="tokens of each prompt (default: 128,2048,16384; on a CPU 128)",
    )
    add(
        "--profiles",
        type=_profiles,
        default=PROFILES,
        metavar="NAME,NAME",
        help=f"of {', '.join(PROFILES)} (default: all)",
    )
    add(
        "--max-depth",
        type=parse_number,
        default=3,
        metavar="K",
        help="the most drafts of a round (default: 3)",
    )
    add("--seconds", type=_seconds, default=1.0, metavar="S", help="of each measurement (default: 1)")
    add("--runs", type=parse_number, default=3, metavar="N", help="measurements of each setting in a stationary profile, all "
        "settings in turn; the median counts (default: 3)")  # fmt: skip
    add("--warm-up-seconds", type=_seconds, default=2.0, metavar="S", help="in which the policy sees a profile before it is "
        "measured there (default: 2)")  # fmt: skip
    add("--switch-seconds", type=_seconds, default=10.0, metavar="S", help=f"after which the profile changes in the cells "
        f"{ALTERNATING!r} (default: 10)")  # fmt: skip
    add(
        "--periods",
        type=parse_number,
        default=2,
        metavar="N",
        help="of two profiles each in these cells (default: 2)",
    )
    add("--output-len", type=parse_number, default=256, metavar="N", help="new tokens of a row, after which all rows start anew "
        "from their prompts, which the prefix cache keeps (default: 256)")  # fmt: skip
    add_engine_flags(parser, kept="all figures")
    return parser


def _profiles(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(PROFILES):
        raise argparse.ArgumentTypeError(f"{text!r} has names that are none of {', '.join(PROFILES)}")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and below 3600")
    return seconds
