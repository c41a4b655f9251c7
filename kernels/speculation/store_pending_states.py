"""Stores the hidden states of a round from which later passes of the MTP layer begin, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.store_pending_states import (
    store_pending_states as store_pending_states_twin,
)
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import (
    check_dense,
    falls_back_to,
    jit_once_for,
    power_of_two,
    tl,
    warps_of,
)


@jit_once_for("window")
def _keep_kernel(
    state_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    state_id_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    count_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    block_hidden_ptr: tl.tensor,
    window: tl.tensor,
    hidden: tl.tensor,
    pending_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    APPENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program stores a token's state."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // window, token % window
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = tl.load(state_ptr + token * hidden + column, mask=is_inside, other=0.0)
    is_live = tl.load(prefill_ptr + row) == 0
    if APPENDS:
        place = tl.maximum(tl.load(count_ptr + row) - 1, 0)
    entry = tl.load(state_id_ptr + row)
    tl.store(pending_ptr + entry * pending_stride + place * hidden + column, state, mask=is_inside & is_live)
    slot = tl.load(slot_ptr + token)
    ends_block = (slot >= 0) & (slot % BLOCK_SIZE == BLOCK_SIZE - 1)
    kept_ptr = block_hidden_ptr + slot // BLOCK_SIZE * hidden + column
    tl.store(kept_ptr, state, mask=is_inside & ends_block)


@falls_back_to(store_pending_states_twin)
def store_pending_states(
    states: torch.Tensor,  # [N, S + 1, hidden] float, after each token of the window
    prefill_status: torch.Tensor,  # [N] int64, 1: the row is not changed
    state_ids: torch.Tensor,  # [N] int64: the row's entry of pending_hidden, distinct
    slot_mapping: torch.Tensor,  # [N, S + 1] int64: block id * block size + offset; -1: not in the cache
    pending_counts: torch.Tensor,  # [N] int64, as `verify_and_rewind` wrote them
    pending_hidden: torch.Tensor,  # [entries, >= S + 1, hidden], written
    block_hidden: torch.Tensor,  # [num_blocks + 1, hidden], written; the last belongs to no block
    block_size_tokens: int,
) -> None:
    """Stores the window's hidden states of live rows as pending; those at block ends also in block_hidden.

    They are stored at the places of their tokens: from the first place on or, without drafts (S = 0), at the
    last pending one.
    """
    rows, window, hidden = states.shape
    check_dense(states, prefill_status, state_ids, slot_mapping, pending_counts, block_hidden)
    assert pending_hidden.shape[1] >= window, (tuple(pending_hidden.shape), window)
    assert pending_hidden.stride()[1:] == (hidden, 1), pending_hidden.stride()
    if rows > 0:
        overlaps, launch = overlap(states.device)
        block = power_of_two(hidden)
        _keep_kernel[(rows * window,)](
            states, prefill_status, state_ids, slot_mapping, pending_counts, pending_hidden, block_hidden, window, hidden,
            pending_hidden.stride(0), BLOCK_SIZE=block_size_tokens, APPENDS=window == 1, BLOCK=block, OVERLAPS=overlaps,
            num_warps=warps_of(block), **launch,
        )  # fmt: skip
