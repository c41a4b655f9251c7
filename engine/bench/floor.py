"""Computes lower bounds of times: bytes that a round must read, operations of a prompt, and the device's
ceilings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.work import Work
from headway.engine.protocol.config import DraftLayers, DraftLmHead
from headway.engine.state.specs import block_bytes, row_bytes
from headway.engine.state.transfer import wait_for
from headway.kernels import most_screened_rows, stream_read

GPU_READ_BYTES, CPU_READ_BYTES = 4 << 30, 256 << 20  # far more than a cache holds
GPU_MATRIX, CPU_MATRIX = 8192, 1024
NUM_TRIES, NUM_CALLS = 5, 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates of this device, measured in this run: bytes read and operations of matrix products a
    second."""

    read_bytes: float
    matmul_flop: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The bytes and multiplications of one model. The trunk consists of the layers of the target. Without a
    draft head drafts read no weights."""

    trunk_bytes: int  # of all its linear layers and of one token's experts, the output layer included
    # The bytes of the experts that a pass is expected to read beyond those of one token, in the trunk, by its
    # number of tokens.
    further_expert_bytes: Callable[[float], float]
    draft_output_bytes: int  # of the output layer as drafts take it
    screened_output_bytes: int  # likewise, where up to most_screened_rows rows draft
    most_screened_rows: int
    draft_layer_bytes: int  # of the weights of one draft layer as drafts take them; 0 without one
    further_draft_expert_bytes: Callable[[float], float]  # as further_expert_bytes, in one draft layer
    num_draft_layers: int
    cache_bytes: Callable[
        [float], float
    ]  # keys and values of a row that are read in the trunk, by its context
    draft_kv_bytes: int  # likewise in one draft layer; 0 without one
    state_bytes: int  # of a row in all recurrent layers, without what they keep of a round's window
    num_weights: int  # of the trunk's linear layers that a token meets, the output layer excluded
    prompt_flop: Callable[[int], float]  # of a prompt, by length, in the trunk's layers beside weights

    def round_bytes(self, *, batch: int, depth: int, context: float) -> float:
        """Returns the bytes that a round moves at least: each weight is read once a pass, the cache of every
        row is read, and its recurrent state is read and written. A draft is a pass of one draft layer and of
        the output layer. A round with drafts runs every draft layer, also those beyond its depth.

        Experts are counted as expected for independent choices of the tokens; similar tokens use fewer.
        """
        is_screened = batch <= self.most_screened_rows
        output_bytes = self.screened_output_bytes if is_screened else self.draft_output_bytes
        num_drafts = depth if self.num_draft_layers > 0 else 0
        passes = max(num_drafts, self.num_draft_layers) if num_drafts > 0 else 0
        of_layer = self.draft_layer_bytes + self.further_draft_expert_bytes(batch)
        drafts = passes * of_layer + num_drafts * output_bytes
        trunk = self.trunk_bytes + self.further_expert_bytes(batch * (depth + 1))
        cache = batch * (self.cache_bytes(context) + context * passes * self.draft_kv_bytes)
        return trunk + drafts + cache + self.moved_state_bytes(batch)

    def moved_state_bytes(self, batch: int) -> int:
        """Returns the part of `round_bytes` that recurrent state takes, which each row reads once and writes
        once."""
        return 2 * batch * self.state_bytes

    def prefill_flop(self, *, num_prompts: int, length: int) -> float:
        """Counts the trunk alone: two operations a weight and token, and what its layers compute besides."""
        return num_prompts * (2.0 * self.num_weights * length + self.prompt_flop(length))


def costs_of(
    models: ModelPair, *, draft_lm_head: DraftLmHead = "full", draft_layers: DraftLayers = "full"
) -> Costs:
    """Returns the costs of the models, which may have no memory."""
    model, head = models.target, models.draft
    work, lm_head, itemsize = model.work(), model.lm_head, model.dtype.itemsize
    outputs, inputs = lm_head.shape if head is None else head.lm_head_shape
    num_draft_layers, draft_bytes, draft_kv_bytes, draft_work = 0, 0, 0, Work(0, 0)
    if head is not None:
        num_draft_layers = head.num_layers
        draft_kv_bytes = block_bytes(head.state(max_window=0), 1) // num_draft_layers
        rounded = head.norms_by_linear() if draft_layers == "fp8" else ()
        saved_bytes = sum(linear.num_weights * (itemsize - 1) for linear in rounded)
        draft_work = head.work()
        draft_bytes = draft_work.active_bytes - saved_bytes
    kept = model.state(max_window=0)
    return Costs(
        trunk_bytes=work.active_bytes + lm_head.nbytes,
        further_expert_bytes=work.further_expert_bytes,
        draft_output_bytes=outputs * inputs * (itemsize if draft_lm_head == "full" else 1),
        screened_output_bytes=outputs * inputs // 2,
        most_screened_rows=most_screened_rows(inputs) if draft_lm_head == "int4" else 0,
        draft_layer_bytes=draft_bytes // max(num_draft_layers, 1),
        further_draft_expert_bytes=lambda tokens: (
            draft_work.further_expert_bytes(tokens) / max(num_draft_layers, 1)
        ),
        num_draft_layers=num_draft_layers,
        cache_bytes=model.cache_bytes,
        draft_kv_bytes=draft_kv_bytes,
        state_bytes=row_bytes(kept),
        num_weights=work.active_weights,
        prompt_flop=model.prompt_flop,
    )


def measured_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Returns the best rates of a few tries. Uses 4 GiB of a GPU's memory for a moment, or half of the free
    memory."""
    return Ceilings(_read_bytes_a_second(device), _matmul_flop_a_second(device, dtype))


def _read_bytes_a_second(device: torch.device) -> float:
    size = CPU_READ_BYTES
    if device.type == "cuda":
        size = min(GPU_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 2 // 4096 * 4096)
    data = torch.zeros(size // 4, dtype=torch.int32, device=device)
    return size / _best_seconds(lambda: stream_read(data), device)


def _matmul_flop_a_second(device: torch.device, dtype: torch.dtype) -> float:
    side = GPU_MATRIX if device.type == "cuda" else CPU_MATRIX
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # compiles and warms up
    times = []
    for _ in range(NUM_TRIES):
        wait_for(device)
        started = time.perf_counter()
        for _ in range(NUM_CALLS):
            work()
        wait_for(device)
        times.append((time.perf_counter() - started) / NUM_CALLS)
    return min(times)
