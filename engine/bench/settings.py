"""Settings of `headway bench engine`: its flags, and the model that they select."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import get_args

import msgspec

from headway.engine.bench.measure import least_new_tokens
from headway.engine.bench.shape import SHAPES, shape_names
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import DraftLayers, DraftLmHead, EngineConfig, QuantizeFormat
from headway.engine.protocol.drafters import wanted_drafter
from headway.engine.protocol.errors import ConfigError
from headway.engine.speculation.select import drafter_name

EMBEDDED = Path(str(files("headway.engine.demo")))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run. Lengths are in tokens. prefill: (prompts at once, tokens each). closed_loop:
    streams. num_runs: the runs of each measurement, of which the median counts. has_heldout_prompts: prompts
    are the embedded model's held-out ones instead of random tokens. engine: see `common_config`."""

    engine: EngineConfig
    batches: tuple[int, ...]
    depths: tuple[int, ...]
    contexts: tuple[int, ...]
    output_len: int
    has_heldout_prompts: bool
    prefill: tuple[tuple[int, int], ...]
    closed_loop: tuple[int, ...]
    num_runs: int
    synthetic_acceptance: tuple[float, ...] | None
    json: Path | None
    prefill_chunk: int | None
    drafter: str
    draft_lm_head: DraftLmHead
    draft_layers: DraftLayers
    tensor_parallel_size: int

    def engine_config(self) -> EngineConfig:
        """Returns the configuration of the one engine for all measurements. Raises ConfigError."""
        model = read_model_spec(self.engine.model_path)
        limit = model.max_position_embeddings
        num_rows = max(*self.batches, *(n for n, _ in self.prefill), *self.closed_loop, 1)
        wanted = [n + self.output_len for n in self.contexts] + [length + 1 for _, length in self.prefill]
        drafter, drafter_path = wanted_drafter(self.drafter)
        config = msgspec.structs.replace(
            self.engine,
            depth=max(self.depths),
            max_model_len=min(limit, max(wanted)),
            max_running=num_rows,
            max_waiting=num_rows,
            prefill_chunk=self.prefill_chunk,
            prefix_caching=False,
            synthetic_acceptance=self.synthetic_acceptance,
            drafter=drafter,
            drafter_path=drafter_path,
            draft_lm_head=self.draft_lm_head,
            draft_layers=self.draft_layers,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        name = drafter_name(config, has_head=model.draft_head is not None)
        depth = 0 if name == "none" else config.depth
        least = least_new_tokens(depth)
        if self.output_len < least:
            raise ConfigError(
                f"--output-len is {self.output_len}, too few to time a round of up to {depth} drafts; set {least} or more"
            )
        return config


def read_settings(argv: Sequence[str], *, has_gpu: bool) -> Settings:
    """Returns the settings. Raises ConfigError; argparse exits for --help and for unknown flags."""
    given = _parser().parse_args(argv)
    check_json(given.json)
    is_cpu = given.device == "cpu" or not has_gpu
    engine = common_config(given)
    if given.prompts == "heldout" and engine.model_path != str(EMBEDDED):
        raise ConfigError(f"--prompts is heldout, which are the embedded model's; leave {given.model} out")
    usual_prefill = ((1, 1024),) if is_cpu else ((1, 1024), (1, 8192), (16, 2048))
    return Settings(
        engine=engine,
        batches=given.batch or ((1, 8) if is_cpu else (1, 8, 32, 64, 128)),
        depths=given.depth,
        contexts=given.input_len,
        output_len=given.output_len or (64 if is_cpu else 256),
        has_heldout_prompts=given.prompts == "heldout",
        prefill=usual_prefill if given.prefill is None else given.prefill,
        closed_loop=given.closed_loop,
        num_runs=given.runs or (1 if is_cpu else 3),
        synthetic_acceptance=given.synthetic_acceptance,
        json=given.json,
        prefill_chunk=given.prefill_chunk,
        drafter=given.drafter,
        draft_lm_head=given.draft_lm_head,
        draft_layers=given.draft_layers,
        tensor_parallel_size=given.tensor_parallel_size,
    )


def common_config(given: argparse.Namespace) -> EngineConfig:
    """Returns the configuration by the flags of `add_model_flags` and `add_engine_flags`. The shapes that
    come along have random weights. Raises ConfigError."""
    is_shape = given.model in shape_names()
    model = EMBEDDED if given.model is None else SHAPES / given.model if is_shape else Path(given.model)
    if not model.is_dir():
        shapes = ", ".join(shape_names())
        raise ConfigError(f"MODEL is {given.model!r}, it must be a folder or one of {shapes}")
    return EngineConfig(
        model_path=str(model),
        load_format="dummy" if is_shape else given.load_format,
        device=given.device,
        dtype=given.dtype,
        threads=given.threads,
        kv_cache_memory_bytes=given.kv_cache_memory,
        fast_math=given.fast_math,
        quantize=given.quantize,
        expanded_weights=given.expanded_weights,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway bench engine",
        description="Measures the engine alone, without HTTP: decode rounds, prefill, start-up, each beside its "
        "floor. No token ends a request.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_model_flags(parser)
    add(
        "--batch",
        type=parse_numbers(1),
        metavar="N,N",
        help="rows at once (default: 1,8,32,64,128; on a CPU 1,8)",
    )
    add(
        "--depth",
        type=parse_numbers(0),
        default=(0, 1, 3),
        metavar="K,K",
        help="drafts a round (default: 0,1,3)",
    )
    add("--input-len", "--context", type=parse_numbers(1), default=(128,), metavar="N,N",
        help="tokens of each prompt: the context of the first round (default: 128)")  # fmt: skip
    add("--prompts", choices=("random", "heldout"), default="random", help="of decode rounds: random tokens, or the "
        "beginnings of the embedded model's held-out prompts, for its real acceptance (default: random)")  # fmt: skip
    add("--output-len", type=parse_number, metavar="N", help="new tokens, some rounds of them: 18 or more with 3 drafts "
        "(default: 256; on a CPU 64)")  # fmt: skip
    add("--prefill", type=_prompts, metavar="NxT,NxT",
        help="prompts at once x their tokens (default: 1x1024,1x8192,16x2048; on a CPU 1x1024; none to skip)")  # fmt: skip
    add("--closed-loop", type=parse_numbers(1), default=(), metavar="N,N",
        help="streams whose next request follows the last one at once, as headway bench serve has them: what is "
        "left of it over HTTP (default: none)")  # fmt: skip
    add("--runs", type=parse_number, metavar="N", help="of each; the median counts (default: 3; on a CPU 1)")
    add("--synthetic-acceptance", type=_rates, metavar="RATES", help="take drafts at each position this often, "
        "such as 0.9,0.8,0.7, whatever the model says; the text means nothing")  # fmt: skip
    add_engine_flags(parser, kept="all figures")
    add("--prefill-chunk", type=parse_number, metavar="N", help="as of headway serve")
    add("--tensor-parallel-size", "--tp", type=parse_number, default=1, metavar="N", help="as of headway serve; floors are "
        "of one rank, without the gathers")  # fmt: skip
    add("--drafter", default="auto", help="as of headway serve, but no ORG/NAME")
    add("--draft-lm-head", choices=get_args(DraftLmHead), default="auto", help="as of headway serve")
    add("--draft-layers", choices=get_args(DraftLayers), default="auto", help="as of headway serve")
    return parser


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the model and of the source of its weights."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, or mimo-7b or mimo-0.5b, which have random weights "
        "(default: the embedded model)")  # fmt: skip
    add("--load-format", choices=("safetensors", "dummy"), default="safetensors",
        help="dummy: random weights, for a folder with config.json alone")  # fmt: skip


def add_engine_flags(parser: argparse.ArgumentParser, *, kept: str) -> None:
    """Adds the flags of the engine for all measurements, and --json. kept: the content of that file."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help=f"write {kept} there")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--dtype", choices=("auto", "float32", "float64", "bfloat16", "float16"), default="auto",
        help="(default: auto: float32 on a CPU)")  # fmt: skip
    add("--threads", type=parse_number, metavar="N", help="CPU threads (default: all cores)")
    add("--kv-cache-memory", type=parse_number, metavar="BYTES", help="as of headway serve")
    add("--fast-math", action="store_true", help="as of headway serve")
    add("--quantize", choices=get_args(QuantizeFormat), default="none", help="as of headway serve")
    add("--expanded-weights", action="store_true", help="as of headway serve")


def check_json(path: Path | None) -> None:
    """Raises ConfigError where no such file can be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json is {path}, and {path.parent} is no folder; make it, or name another file")
    if path is not None and path.is_dir():
        raise ConfigError(f"--json is {path}, which is a folder; name a file")


def parse_number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


def parse_numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.isdecimal() and int(part) >= least for part in parts):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list of whole numbers from {least}, such as 1,8"
            )
        return tuple(int(part) for part in parts)

    return parse


def _prompts(text: str) -> tuple[tuple[int, int], ...]:
    if text == "none":
        return ()
    pairs = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(n.isdecimal() and int(n) > 0 for n in pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of prompts x tokens, such as 1x1024,16x2048")
    return tuple((int(count), int(length)) for count, length in pairs)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 0.9,0.8,0.7") from None
