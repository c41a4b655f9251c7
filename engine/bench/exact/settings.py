"""Settings of `headway bench exact`: its flags, and the engine that they select."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

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
from headway.engine.protocol.drafters import wanted_drafter
from headway.engine.protocol.errors import ConfigError

BORDERS_OF_PROMPTS = 3  # within the longest prompt of a model with recurrent layers


@dataclass(frozen=True, slots=True)
class Settings:
    """Lengths in tokens. num_texts: requests that differ; the others repeat them under further combinations.
    companies: sizes of the company, 1 for a request alone. chunks: prompt tokens of a step besides the
    engine's own policy. num_soaked: requests of the soak. num_tokens: the tokens of each output. engine: see
    `common_config`."""

    engine: EngineConfig
    num_requests: int
    num_texts: int
    num_tokens: int
    num_soaked: int
    depth: int
    companies: tuple[int, ...]
    chunks: tuple[int, ...]
    input_len: int
    seed: int
    json: Path | None
    drafter: str
    tensor_parallel_size: int

    @property
    def second_engine(self) -> str:
        return "a restarted engine" if self.tensor_parallel_size == 1 else "another engine, of one rank"

    @property
    def has_recorded_drafts(self) -> bool:
        """Returns whether drafts come from the references: those of random weights would never be right."""
        if self.depth == 0 or self.drafter != "auto":
            return self.depth > 0 and self.drafter == "recorded"
        is_dummy = self.engine.load_format == "dummy"
        return is_dummy or read_model_spec(self.engine.model_path).draft_head is None

    def engine_config(self, num_ranks: int) -> EngineConfig:
        """Raises ConfigError."""
        limit = read_model_spec(self.engine.model_path).max_position_embeddings
        wanted = self.input_len + self.num_tokens + 1
        if wanted > limit:
            raise ConfigError(
                f"--input-len is {self.input_len} and --tokens {self.num_tokens}, together with one token more at most "
                f"{limit} for this model; lower one of them"
            )
        drafter, drafter_path = wanted_drafter("auto" if self.drafter == "recorded" else self.drafter)
        if self.depth == 0:
            drafter = "none"
        elif self.has_recorded_drafts:
            drafter = "ngram"  # it looks up the predicted outputs of the requests
        return msgspec.structs.replace(
            self.engine,
            depth=self.depth,
            drafter=drafter,
            drafter_path=drafter_path,
            max_model_len=wanted,
            max_running=max(self.companies),
            tensor_parallel_size=num_ranks,
        )


def read_settings(argv: Sequence[str], *, has_gpu: bool) -> Settings:
    """Raises ConfigError; --help and flags that do not exist leave as argparse does."""
    given = _parser().parse_args(argv)
    check_json(given.json)
    if given.depth > MAX_DEPTH:
        raise ConfigError(f"--depth is {given.depth}, it must be 0 to {MAX_DEPTH}")
    is_cpu = given.device == "cpu" or not has_gpu
    engine = common_config(given)
    grid = read_model_spec(engine.model_path).prompt_grid or 1
    least = BORDERS_OF_PROMPTS * grid  # so that some find a cached prefix
    num_requests = (120 if is_cpu else 1000) if given.requests is None else given.requests
    num_texts = min(given.texts or num_requests, max(num_requests, 1))
    return Settings(
        engine=engine,
        num_requests=num_requests,
        num_texts=max(num_texts, 2),
        num_tokens=given.tokens or (16 if is_cpu else 64),
        num_soaked=given.soak,
        depth=given.depth,
        companies=given.batch or ((1, 4, 8) if is_cpu else (1, 32, 128)),
        chunks=_chunks(given.prefill_chunk, 32 if is_cpu else 80, grid),
        input_len=given.input_len or max(96 if is_cpu else 512, least),
        seed=given.seed,
        json=given.json,
        drafter=given.drafter,
        tensor_parallel_size=given.tensor_parallel_size,
    )


def _chunks(wanted: tuple[int, ...] | None, default: int, least: int) -> tuple[int, ...]:
    """least: the tokens of a prompt that the model computes at once. Raises ConfigError for fewer."""
    if wanted is not None and min(wanted) < least:
        raise ConfigError(
            f"--prefill-chunk has {min(wanted)}, it must be {least} or more for this model, whose recurrent layers compute "
            f"prompts in pieces of {least} tokens"
        )
    return wanted or (max(default, least),)


def _drafter(text: str) -> str:
    if text == "none":
        raise argparse.ArgumentTypeError(
            "must be auto, mtp, ngram, recorded, a folder, or mtp or a folder with ,ngram; --depth 0 drafts nothing"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway bench exact",
        description="Checks that depth, company, prefix cache, prompt chunks, preemption and a restart change no token and no bit of "
        "a log-probability: every request runs once under a combination of them that is drawn at random, and is compared with "
        "its run at depth 0, alone, with a cold cache; half of them run in a second engine. Exit status 1: some request differs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_model_flags(parser)
    add(
        "--requests",
        type=_count,
        metavar="N",
        help="runs that are compared; 0: only the soak (default: 1000; on a CPU 120)",
    )
    add("--texts", type=parse_number, metavar="N", help="requests that differ, each of which costs a run alone; the others "
        "repeat them under further combinations (default: as many as --requests)")  # fmt: skip
    add(
        "--tokens",
        type=parse_number,
        metavar="N",
        help="new tokens of each request (default: 64; on a CPU 16)",
    )
    add("--soak", type=_count, default=0, metavar="N", help="then serve N requests that arrive at random, twice in different "
        "orders, and compare both times (default: 0)")  # fmt: skip
    add("--depth", type=_count, default=4, metavar="K", help="compare depths 0 to K (default: 4)")
    add("--batch", type=parse_numbers(1), metavar="N,N", help="requests that run at the same time, 1: alone (default: 1,32,128; "
        "on a CPU 1,4,8)")  # fmt: skip
    add("--prefill-chunk", type=parse_numbers(1), metavar="N,N", help="prompt tokens of a step, besides what headway serve takes "
        "by itself (default: 80; on a CPU 32)")  # fmt: skip
    add("--input-len", type=parse_number, metavar="N", help="the longest prompt (default: 512; on a CPU 96, "
        "with recurrent layers 192)")  # fmt: skip
    add("--seed", type=_count, default=0, metavar="N", help="of all that is drawn at random (default: 0)")
    add_engine_flags(parser, kept="all figures and differences")
    add("--tensor-parallel-size", "--tp", type=parse_number, default=1, metavar="N", help="as of headway serve: of the first "
        "engine, which has the runs alone, too; the second one has one rank")  # fmt: skip
    add("--drafter", type=_drafter, default="auto", help="auto, mtp, ngram, a folder, or recorded: n-gram lookup in the reference's own "
        "tokens, six of seven right (default: auto: the model's draft head, or recorded where it has none or the weights are random)")  # fmt: skip
    return parser
