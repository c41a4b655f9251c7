"""Writes new keys and values to their slots of the paged cache."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.kv_append import kv_append as kv_append_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl


@jit
def _append_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    width: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        is_inside = column < width
        key = tl.load(key_ptr + token * key_stride + column, mask=is_inside)
        value = tl.load(value_ptr + token * value_stride + column, mask=is_inside)
        tl.store(key_cache_ptr + slot * width + column, key, mask=is_inside)
        tl.store(value_cache_ptr + slot * width + column, value, mask=is_inside)


def kv_append(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
) -> None:
    """Writes the slots named and touches no other cell."""
    if takes_triton(key_cache):
        check_dense(key_cache, value_cache, slot_mapping)
        tokens, width = key.shape[0], key.shape[1] * key.shape[2]
        if tokens > 0:
            check_dense(key[0], value[0])
            overlaps, launch = overlap(key.device)
            _append_kernel[(tokens,)](
                key, value, key_cache, value_cache, slot_mapping, width, key.stride(0), value.stride(0),
                BLOCK=power_of_two(width), OVERLAPS=overlaps, **launch,
            )  # fmt: skip
        return
    kv_append_twin(key, value, key_cache, value_cache, slot_mapping)
