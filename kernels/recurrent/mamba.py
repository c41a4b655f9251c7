"""Restores recurrent states to those after the last accepted token."""

from __future__ import annotations

import torch

from headway.kernels.reference.recurrent.mamba import (
    mamba_state_selective_copy as mamba_state_selective_copy_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, power_of_two, tl

_BLOCK = 1024
# States are copied as integers, so that every dtype works.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _copy_kernel(
    intermediate_ptr: tl.tensor,
    current_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    state_size: tl.tensor,
    from_layer_stride: tl.tensor,
    from_slot_stride: tl.tensor,
    from_place_stride: tl.tensor,
    to_layer_stride: tl.tensor,
    to_slot_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Each program copies BLOCK elements of the state of a row and layer."""
    row, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    if tl.load(prefill_ptr + row) == 0:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        place = tl.load(accepted_ptr + row).to(tl.int64)
        element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_inside = element < state_size
        from_ptr = intermediate_ptr + layer * from_layer_stride + slot * from_slot_stride
        state = tl.load(from_ptr + place * from_place_stride + element, mask=is_inside)
        tl.store(
            current_ptr + layer * to_layer_stride + slot * to_slot_stride + element, state, mask=is_inside
        )


@falls_back_to(mamba_state_selective_copy_twin)
def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,  # [layers, slots, S+1, *state]: after each token of the window
    current_states: torch.Tensor,  # [layers, slots, *state], in place
    prefill_status: torch.Tensor,  # [N] integer, 1: prefill row, nothing to copy
    state_idx: torch.Tensor,  # [N] integer: slot of each row
    accepted_counts: torch.Tensor,  # [N] integer: drafts accepted
    num_layers: int,
) -> None:
    """Sets current[l, slot] = intermediate[l, slot, accepted] for the decode rows. Slots are distinct."""
    check_dense(prefill_status, state_idx, accepted_counts)
    rows, size = prefill_status.numel(), current_states[0, 0].numel()
    assert intermediate_states[0, 0, 0].is_contiguous(), intermediate_states.stride()
    assert current_states[0, 0].is_contiguous(), current_states.stride()
    bits = _BITS[current_states.element_size()]
    block = min(power_of_two(size), _BLOCK)
    if rows > 0:
        _copy_kernel[(rows, blocks_of(size, block), num_layers)](
            intermediate_states.view(bits), current_states.view(bits), prefill_status, state_idx,
            accepted_counts, size, *intermediate_states.stride()[:3], *current_states.stride()[:2],
            BLOCK=block,
        )  # fmt: skip
