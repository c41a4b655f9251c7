"""Copies entries of state to other entries in one launch, without temporary memory."""

from __future__ import annotations

import torch

from headway.kernels.reference.transfer.copy_entries import copy_entries as copy_entries_twin
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)

_BLOCK, _WARPS = 4096, 8
# State is copied as integers, so that every dtype works.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit_once_for("source_ptr", "target_ptr", "entries")
def _copy_entries_kernel(
    memory_ptr: tl.tensor,
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    entries: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Each program copies BLOCK elements of an entry in a layer."""
    element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(2).to(tl.int64) * entries
    source = tl.load(source_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    is_inside = element < size
    values = tl.load(memory_ptr + (layer + source) * size + element, mask=is_inside)
    tl.store(memory_ptr + (layer + target) * size + element, values, mask=is_inside)


def copy_entries(
    memory: torch.Tensor,  # [layers, entries, *shape], in place
    sources: torch.Tensor,  # [n] int64: entries
    targets: torch.Tensor,  # [n] int64: entries, distinct and not among the sources
) -> None:
    """Sets memory[:, targets] = memory[:, sources]."""
    if not takes_triton(memory):
        copy_entries_twin(memory, sources, targets)
        return
    check_dense(memory, sources, targets)
    layers, entries = memory.shape[:2]
    size = memory.numel() // max(layers * entries, 1)
    if len(sources) > 0 and memory.numel() > 0:
        block = min(power_of_two(size), _BLOCK)
        _copy_entries_kernel[(len(sources), blocks_of(size, block), layers)](
            memory.view(_BITS[memory.element_size()]), sources, targets, entries, size,
            BLOCK=block, num_warps=_WARPS if block == _BLOCK else 4,
        )  # fmt: skip
