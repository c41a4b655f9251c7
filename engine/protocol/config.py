"""The engine's configuration: built once by the CLI, sent as the first frame, never changed.

Values that are measured later, such as the number of blocks, belong to the code that measures them.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Literal

import msgspec

from headway.engine.protocol.drafters import DrafterName
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.logs import LogFormat

MAX_DEPTH, MAX_RANKS = 8, 8
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 256
CPU_MAX_RUNNING, CUDA_MAX_RUNNING = 64, 256
CPU_MAX_EXTRA_ROWS = 16
MIN_PREFILL_CHUNK = 16
MAX_RELAXED_TOP_K = 2**31 - 1  # kernels compare it with a count of 32 bits
LEAST_MAX_THREADS, THREADS_PER_CORE = 64, 4

DraftLmHead = Literal["auto", "full", "int4", "fp8"]
DraftLayers = Literal["auto", "full", "fp8"]
QuantizeFormat = Literal["none", "fp8", "int8", "int4"]
CpuWeights = Literal["full", "int8", "int4"]


class Quantize(msgspec.Struct, frozen=True):
    """The format to which linear weights are quantised as they are read. with_lm_head: the lm_head is
    quantised, too."""

    format: QuantizeFormat = "none"
    with_lm_head: bool = False


FULL = Quantize()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the engine process needs to start.

    Lengths are in tokens. `None` means: decided from the model or the machine. prefill_chunk: prompt tokens
    computed in a step (see PrefillPolicy). depth: the most drafts of a round; chooses_depth: a policy chooses
    the depth of each round. mixed_above_tokens: prompts share the forward pass of rounds with more tokens
    than this; None: of no round on a CPU. max_extra_rows: requests that run at once beyond the first of each
    HTTP request; None: no limit but max_running. max_waiting: HTTP requests that may wait. load_format:
    "dummy" draws the weights at random instead of reading them, for measurements. drafter: the drafter; auto
    is the draft head if the model has one, else there is none. drafter_path: the folder of a drafter that is
    used instead; drafter is then auto, or the kind of the folder. drafter_taps: the target's layers at whose
    input an EAGLE-3 head reads the stream; None: those of its config.json. require_speculation: refuses to
    start if nothing drafts, or if the head fails its check. synthetic_acceptance: the rate at which the draft
    at each position is accepted, whatever the model says, for measurements. relaxed_thinking: LOSSY: while a
    request reasons, a draft is also accepted if fewer than this number of tokens are more probable, and the
    most probable one by this probability at most; None: drafts change no text. audit_rate: the share of the
    finished requests that is recomputed without drafts, 0 to 1. draft_lm_head: the format of the output layer
    of drafts; draft_layers: the format of weights and inputs in the draft layers' products that follow a
    norm. quantize: the format to which the target's linear weights are quantised as they are read.
    expanded_weights: keeps expanded copies of quantised weights on a GPU, by which many rows multiply.
    cpu_weights: the format by which a CPU multiplies, without effect on a GPU; int8 and int4 give other
    texts. deterministic: refuses to start where a row's text could depend on the other rows, on the depth, or
    on how its prompt was cut. fast_math: lets it depend on these on a GPU. tensor_parallel_size: the number
    of processes (ranks) that compute the model together; threads and kv_cache_memory_bytes hold for each of
    them. log_level, log_format: those of this process.
    """

    model_path: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    quantize: QuantizeFormat = "none"
    quantize_lm_head: bool = False
    expanded_weights: bool = False
    cpu_weights: CpuWeights = "full"
    depth: int = 3
    chooses_depth: bool = False
    drafter: DrafterName = "auto"
    drafter_path: str | None = None
    drafter_taps: tuple[int, ...] | None = None
    require_speculation: bool = False
    draft_lm_head: DraftLmHead = "auto"
    draft_layers: DraftLayers = "auto"
    max_model_len: int | None = None
    max_running: int | None = None
    max_extra_rows: int | None = None
    max_waiting: int = 1024
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    prefill_chunk: int | None = None
    mixed_above_tokens: int | None = None
    prefix_caching: bool = True
    threads: int | None = None
    synthetic_acceptance: tuple[float, ...] | None = None
    relaxed_thinking: tuple[int, float] | None = None
    audit_rate: float = 0.0
    deterministic: bool = False
    fast_math: bool = False
    tensor_parallel_size: int = 1
    log_level: str = "info"
    log_format: LogFormat = "human"

    def __post_init__(self) -> None:
        flag = "max_depth" if self.chooses_depth else "depth"
        _require(0 <= self.depth <= MAX_DEPTH, flag, self.depth, f"0 to {MAX_DEPTH}")
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            "max_model_len",
            self.max_model_len,
            "2 or more",
        )
        is_allowed = self.max_running is None or 1 <= self.max_running <= 4096
        _require(is_allowed, "max_running", self.max_running, "1 to 4096")
        _require(self.max_waiting >= 1, "max_waiting", self.max_waiting, "1 or more")
        is_power_of_two = self.block_size & (self.block_size - 1) == 0
        _require(
            is_power_of_two and MIN_BLOCK_SIZE <= self.block_size <= MAX_BLOCK_SIZE,
            "block_size", self.block_size, f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
        )  # fmt: skip
        is_enough = self.prefill_chunk is None or self.prefill_chunk >= MIN_PREFILL_CHUNK
        _require(is_enough, "prefill_chunk", self.prefill_chunk, f"{MIN_PREFILL_CHUNK} or more")
        cores, most = os.cpu_count() or 1, max_threads()
        is_possible = self.threads is None or 1 <= self.threads <= most
        _require(is_possible, "threads", self.threads, f"1 to {most:,} (this machine has {cores:,} cores)")
        is_group = 1 <= self.tensor_parallel_size <= MAX_RANKS
        _require(is_group, "tensor_parallel_size", self.tensor_parallel_size, f"1 to {MAX_RANKS}")
        _require(0 <= self.audit_rate <= 1, "audit_rate", self.audit_rate, "0 to 1")
        if self.relaxed_thinking is not None:
            top_k, max_gap = self.relaxed_thinking
            shown, limit = (
                f"{top_k},{max_gap:g}",
                f"a number of tokens from 1 to {MAX_RELAXED_TOP_K:,}, and a probability from 0 to 1",
            )
            is_possible = 1 <= top_k <= MAX_RELAXED_TOP_K and 0 <= max_gap <= 1
            _require(is_possible, "relaxed_thinking", shown, limit)
        if self.synthetic_acceptance is not None:
            _check_rates(self.synthetic_acceptance, self.depth, flag)

    @property
    def num_rows(self) -> int:
        """Returns the number of requests that can run at once: max_running, or the smaller default before it
        is resolved."""
        return self.max_running or CPU_MAX_RUNNING


def max_threads() -> int:
    """Returns the most threads. Threads beyond the cores only wait for each other, thousands of them for
    minutes."""
    return max(LEAST_MAX_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1))


def _check_rates(rates: tuple[float, ...], depth: int, flag: str) -> None:
    """flag: the flag that sets the depth."""
    falls = all(0 <= later <= earlier <= 1 for earlier, later in pairwise((1.0, *rates)))
    shown = ",".join(f"{rate:g}" for rate in rates)
    _require(falls, "synthetic_acceptance", shown, "numbers from 1 to 0 that do not rise")
    limit = f"as long as --{flag.replace('_', '-')}, {depth} numbers or more"
    _require(len(rates) >= depth, "synthetic_acceptance", shown, limit)


def _require(is_met: bool, flag: str, value: object, limit: str) -> None:
    if not is_met:
        name = flag.replace("_", "-")
        raise ConfigError(f"--{name} is {value}, it must be {limit}")
