"""Sorts the pairs of tokens and experts into blocks of one expert each. Knows no products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit_once_for, power_of_two, tl
from headway.kernels.types._experts import PairBlocks

# Up to that many tokens each pair is a block of its own: experts that two of them chose are read from the L2
# cache the second time, which takes less than a launch.
MOST_UNSORTED = 8
_ROWS_OF_ONE, _LEAST_ROWS, _MOST_ROWS = 8, 16, 64  # tensor cores multiply no fewer than 8
_CHUNK, _WARPS = 4096, 16


@jit_once_for("num_pairs", "num_blocks")
def _arrange_kernel(
    id_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    cursor_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program. EXPERTS: a power of two. Pairs of an expert come in any order: each has a row of its
    own."""
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ids = tl.load(id_ptr + first + place, mask=first + place < num_pairs, other=-1)
        counts += tl.histogram(ids, EXPERTS, mask=ids >= 0)
    starts = tl.cumsum(counts, 0) - counts
    blocks = (counts + (ROWS - 1)) // ROWS
    first_block = tl.cumsum(blocks, 0) - blocks
    tl.store(cursor_ptr + expert, starts)
    for index in range(tl.max(blocks, 0)):
        is_block = index < blocks
        start = starts + index * ROWS
        tl.store(expert_ptr + first_block + index, expert, mask=is_block)
        tl.store(start_ptr + first_block + index, start, mask=is_block)
        tl.store(end_ptr + first_block + index, tl.minimum(start + ROWS, starts + counts), mask=is_block)
    used = tl.sum(blocks, 0)
    for first in range(0, num_blocks, CHUNK):
        block = first + place
        tl.store(expert_ptr + block, -1, mask=(block >= used) & (block < num_blocks))
    tl.debug_barrier()
    for first in range(0, num_pairs, CHUNK):
        pair = first + place
        ids = tl.load(id_ptr + pair, mask=pair < num_pairs, other=-1)
        is_pair = ids >= 0
        rank = tl.atomic_add(cursor_ptr + ids, 1, mask=is_pair)
        tl.store(order_ptr + rank, pair, mask=is_pair)


class BlockSizes(NamedTuple):
    """rows: the most pairs of a block. chunk: pairs that are sorted at once; 0: each is a block of its
    own."""

    rows: int
    num_blocks: int
    chunk: int


def sizes_of_blocks(tokens: int, slots: int, num_experts: int) -> BlockSizes:
    """Returns how the pairs of that many tokens are best arranged."""
    pairs = tokens * slots
    if tokens <= MOST_UNSORTED:
        return BlockSizes(_ROWS_OF_ONE, pairs, 0)
    rows = min(max(power_of_two(pairs // num_experts), _LEAST_ROWS), _MOST_ROWS)
    return BlockSizes(rows, pairs // rows + min(pairs, num_experts), min(power_of_two(pairs), _CHUNK))


def arrange_pairs(
    ids: torch.Tensor,  # [tokens, slots] int32; -1: no expert
    num_experts: int,
) -> PairBlocks | None:
    """Returns the pairs in blocks; None where each is best a block of its own."""
    check_dense(ids)
    rows, num_blocks, chunk = sizes_of_blocks(len(ids), ids.shape[1], num_experts)
    if chunk == 0:
        return None
    num_pairs, experts = ids.numel(), power_of_two(num_experts)
    sizes = [num_pairs, num_blocks, num_blocks, num_blocks, experts]
    order, of_block, starts, ends, cursor = torch.split(ids.new_empty(sum(sizes)), sizes)
    overlaps, launch = overlap(ids.device)
    _arrange_kernel[(1,)](
        ids, order, of_block, starts, ends, cursor, num_pairs, num_blocks, ROWS=rows, EXPERTS=experts,
        CHUNK=chunk, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
    )  # fmt: skip
    return PairBlocks(order, of_block, starts, ends, rows)
