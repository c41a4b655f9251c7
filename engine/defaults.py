"""Chooses the values of options that are left at "auto", for this model on this device. Builds nothing."""

from __future__ import annotations

import msgspec
import torch

from headway.engine.execution.step_key import ROW_STEP
from headway.engine.outline import Outline
from headway.engine.protocol.config import (
    CPU_MAX_EXTRA_ROWS,
    CPU_MAX_RUNNING,
    CUDA_MAX_RUNNING,
    MIN_PREFILL_CHUNK,
    EngineConfig,
)
from headway.engine.scheduling.prefill_policy import DEFAULT_CHUNK, MAX_MIXED_TOKENS, PrefillPolicy
from headway.engine.state.specs import row_bytes

WEIGHTS_A_THREAD = 10_000_000
CPU_STEP_FLOP = 3.85e10  # about one second of two slow cores
# The operations of one multiprocessor in a step: about 1/30 s on an H200, and 1/5 s while no stream waits.
MULTIPROCESSOR_STEP_FLOP, MULTIPROCESSOR_IDLE_STEP_FLOP = 1.17e11, 9.36e11
MAX_CUDA_CHUNK = 1024
MAX_STATE_SHARE = 0.25  # of the memory that weights leave, for the recurrent state of all rows
# The share of the GPU memory left by the weights that the largest pass of prompts may take; a round may take
# as much.
MAX_STEP_SHARE = 0.075
MIN_IDLE_CHUNK, MAX_IDLE_CHUNK = 2048, 8192
# The most tokens of a round that has a forward pass of its own on a GPU: those of one stream at any usual
# depth.
MAX_SEPARATE_TOKENS = 8


def num_threads(active_weights: int, most: int) -> int:
    """Returns the number of CPU threads for a model's operations. most: the number that torch uses by
    default, the cores or OMP_NUM_THREADS.

    The operations of a small model are so short that threads lose more time by waiting for each other than
    they save, and far more while another process is busy.
    """
    return min(most, max(1, active_weights // WEIGHTS_A_THREAD))


def max_running(outline: Outline, depth: int, available: int) -> int:
    """Returns the number of rows. available: bytes on the device once the weights are loaded. On CUDA it is
    the number whose adjusted logits of a whole window take MAX_STEP_SHARE of the available bytes, but at
    least the CPU's default. On every device it is at most the number whose recurrent state takes
    MAX_STATE_SHARE of them."""
    state_bytes = row_bytes(outline.model.state(depth + 1))
    most = CUDA_MAX_RUNNING
    if state_bytes > 0:
        most = max(1, int(MAX_STATE_SHARE * available) // state_bytes)
    if outline.device.type == "cpu":
        return min(CPU_MAX_RUNNING, most)
    fitting = int(MAX_STEP_SHARE * available) // outline.round_row_bytes(depth)
    return min(max(fitting // ROW_STEP * ROW_STEP, CPU_MAX_RUNNING), CUDA_MAX_RUNNING, most)


def with_rows(config: EngineConfig, outline: Outline, available: int) -> EngineConfig:
    """Returns the configuration with the numbers of requests that run at once. available: as for
    `max_running`."""
    return msgspec.structs.replace(
        config,
        max_running=config.max_running or max_running(outline, config.depth, available),
        max_extra_rows=config.max_extra_rows or max_extra_rows(outline.device),
    )


def max_extra_rows(device: torch.device) -> int | None:
    """Returns the most rows beyond the first of each HTTP request; None: no limit.

    On a CPU a round takes longer with more rows, and a small request waits for the running round: with 64
    choices of another request it waits three times as long as with 16, for 1.4 times their throughput.
    """
    return CPU_MAX_EXTRA_ROWS if device.type == "cpu" else None


def prefill_policy(config: EngineConfig, outline: Outline, available: int) -> PrefillPolicy:
    """Returns the policy for the prompt tokens of a step: --prefill-chunk in every step, or numbers that keep
    steps short on this device. available: bytes on the device once the weights are loaded."""
    above = mixed_above_tokens(config, outline.device)
    if config.prefill_chunk is not None:
        return PrefillPolicy.uniform(config.prefill_chunk, mixed_above_tokens=above)
    separate = _separate_chunk(outline, available)
    return PrefillPolicy(
        idle=separate if outline.device.type != "cuda" else _idle_chunk(outline, available),
        separate=separate,
        mixed=min(separate, MAX_MIXED_TOKENS),
        mixed_above_tokens=above,
    )


def mixed_above_tokens(config: EngineConfig, device: torch.device) -> int | None:
    """Returns the tokens of a round above which prompts share its forward pass; None: never.

    Small rounds are slowed more by prompts than the saved pass is worth.
    """
    if config.mixed_above_tokens is not None or device.type != "cuda":
        return config.mixed_above_tokens
    return MAX_SEPARATE_TOKENS


def _separate_chunk(outline: Outline, available: int) -> int:
    """Returns the prompt tokens of a step while requests decode. Slow devices and large models compute fewer
    tokens a step, so that streams do not stall and the engine does not seem stuck."""
    if outline.device.type != "cuda":
        fitting = int(CPU_STEP_FLOP / (2 * outline.models.active_weights))
        return min(max(fitting, outline.spec.prompt_grid or MIN_PREFILL_CHUNK), DEFAULT_CHUNK)
    wanted = min(_tokens_in_time(MULTIPROCESSOR_STEP_FLOP, outline), MAX_CUDA_CHUNK)
    return _fitting_chunk(wanted, outline, available)


def _idle_chunk(outline: Outline, available: int) -> int:
    """Returns the prompt tokens of a step while no request decodes. A GPU computes long chunks faster. A
    request that arrives meanwhile waits for one step, or for two if another is launched already, so that slow
    GPUs and large models use shorter chunks."""
    in_time = _tokens_in_time(MULTIPROCESSOR_IDLE_STEP_FLOP, outline)
    wanted = min(max(in_time, MIN_IDLE_CHUNK), MAX_IDLE_CHUNK)
    return _fitting_chunk(wanted, outline, available)


def _tokens_in_time(multiprocessor_flop: float, outline: Outline) -> int:
    return int(outline.facts.num_multiprocessors * multiprocessor_flop / (2 * outline.models.active_weights))


def _fitting_chunk(wanted: int, outline: Outline, available: int) -> int:
    """Returns a power of two up to `wanted` tokens, whose activations take at most MAX_STEP_SHARE of the
    available bytes, but at least DEFAULT_CHUNK."""
    fitting = int(MAX_STEP_SHARE * available) // outline.prompt_token_bytes
    return max(_power_of_two(min(wanted, fitting)), DEFAULT_CHUNK)


def _power_of_two(size: int) -> int:
    """Returns the greatest power of two that is not above `size`."""
    return 1 << (max(size, 1).bit_length() - 1)
