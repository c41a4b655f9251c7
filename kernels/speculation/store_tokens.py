"""Writes token ids to their slots of a paged token cache."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.store_tokens import store_tokens as store_tokens_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl

_TOKENS, _WARPS = 256, 2


@jit_once_for("num_tokens", "token_ptr", "slot_ptr")
def _store_tokens_kernel(
    token_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    num_tokens: tl.tensor,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One lane per token."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = place < num_tokens
    slot = tl.load(slot_ptr + place, mask=is_token, other=-1)
    token = tl.load(token_ptr + place, mask=is_token, other=0)
    tl.store(cache_ptr + slot, token.to(tl.int32), mask=slot >= 0)


@falls_back_to(store_tokens_twin)
def store_tokens(
    token_ids: torch.Tensor,  # [tokens] int64
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    token_cache: torch.Tensor,  # [num_blocks, block_size] int32, written
) -> None:
    """Writes each token id to its slot; other slots are not changed."""
    check_dense(token_ids, slot_mapping, token_cache)
    num_tokens = token_ids.numel()
    if num_tokens > 0:
        overlaps, launch = overlap(token_ids.device)
        _store_tokens_kernel[(blocks_of(num_tokens, _TOKENS),)](
            token_ids, slot_mapping, token_cache, num_tokens,
            TOKENS=_TOKENS, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
        )  # fmt: skip
