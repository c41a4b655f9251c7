"""The gated delta rule over the windows of a round, token by token."""

from __future__ import annotations

import torch

from headway.kernels.recurrent._delta_steps import run_steps
from headway.kernels.reference.recurrent.delta_windows import delta_windows as delta_windows_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, jit_once_for, takes_triton, tl
from headway.kernels.types._delta_rule import DeltaRule, DeltaState

_BLOCK = 1024


@jit_once_for("gate_ptr", "id_ptr", "width", "max_width")
def _keep_kernel(
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    kept_mixed_ptr: tl.tensor,
    kept_gate_ptr: tl.tensor,
    id_ptr: tl.tensor,
    width: tl.tensor,
    max_width: tl.tensor,
    query_size: tl.tensor,
    kept_size: tl.tensor,
    num_gates: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program copies BLOCK keys, values and gates of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(id_ptr + token // width).to(tl.int64) * max_width + token % width
    is_mixed, gate = column < kept_size, column - kept_size
    mixed = tl.load(mixed_ptr + token * mixed_stride + query_size + column, mask=is_mixed)
    tl.store(kept_mixed_ptr + place * kept_size + column, mixed, mask=is_mixed)
    is_gate = (gate >= 0) & (gate < num_gates)
    value = tl.load(gate_ptr + token * gate_stride + gate, mask=is_gate)
    tl.store(kept_gate_ptr + place * num_gates + gate, value, mask=is_gate)


def delta_windows(
    mixed: torch.Tensor,  # [rows * width, channels]: queries, keys and values after the convolution
    gates: torch.Tensor,  # [rows * width, 2 * V]: inputs of the gates of writing, then of those of decay
    rule: DeltaRule,
    state: DeltaState,
    state_ids: torch.Tensor,  # [rows] int64
    out: torch.Tensor,  # [rows * width, V, D], written
) -> None:
    """Advances each row's state by the accepted tokens of its last window, writes the results of this window,
    and stores its inputs for the next call. `state.states` then holds the state before this window."""
    if not takes_triton(mixed):
        delta_windows_twin(mixed, gates, rule, state, state_ids, out)
        return
    if len(mixed) == 0:
        return
    run_steps(mixed, gates, rule, state, state_ids, out)
    # This is another launch, because the programs of all heads read what it overwrites.
    overlaps, launch = overlap(mixed.device)
    kept_size, num_gates = state.mixed.shape[2], gates.shape[1]
    _keep_kernel[(len(mixed), blocks_of(kept_size + num_gates, _BLOCK))](
        mixed, gates, state.mixed, state.gates, state_ids, len(mixed) // len(state_ids), state.mixed.shape[1],
        rule.query_size, kept_size, num_gates, mixed.stride(0), gates.stride(0), BLOCK=_BLOCK,
        OVERLAPS=overlaps, **launch,
    )  # fmt: skip
