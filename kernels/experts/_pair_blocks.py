"""Sorts the pairs of tokens and experts into blocks of one expert each, for the grouped GEMM. Knows no
products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, jit_once_for, power_of_two, tl
from headway.kernels.types._experts import PairBlocks

# Up to this number of tokens each pair is a block of its own. An expert that two tokens chose is read from
# the L2 cache the second time, which takes less time than a launch.
MOST_UNSORTED = 8
_ROWS_OF_ONE, _LEAST_ROWS, _MOST_ROWS = 8, 16, 64  # tensor cores multiply no fewer than 8
# The most pairs that a single program sorts, and its warps; the pairs of each program if there are more.
_CHUNK, _WARPS, _PART = 8192, 16, 1024


@jit
def _chosen(id_ptr: tl.tensor, pair: tl.tensor, num_pairs: tl.tensor) -> tl.tensor:
    return tl.load(id_ptr + pair, mask=pair < num_pairs, other=-1)


@jit
def _store_blocks(
    counts: tl.tensor,  # [EXPERTS] int32: pairs of each expert
    expert_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    cursor_ptr: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Stores the begin and end of each block, and in the cursors the begin of each expert's pairs."""
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
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


@jit
def _place_pairs(ids: tl.tensor, pair: tl.tensor, order_ptr: tl.tensor, cursor_ptr: tl.tensor) -> None:
    """Stores each pair at its expert's cursor. The order does not matter, because each pair has its own
    row."""
    rank = tl.atomic_add(cursor_ptr + ids, 1, mask=ids >= 0)
    tl.store(order_ptr + rank, pair, mask=ids >= 0)


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
    """A single program sorts up to CHUNK pairs. EXPERTS: a power of two."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.arange(0, CHUNK)
    ids = _chosen(id_ptr, pair, num_pairs)
    counts = tl.histogram(ids, EXPERTS, mask=ids >= 0)
    _store_blocks(counts, expert_ptr, start_ptr, end_ptr, cursor_ptr, num_blocks, ROWS, EXPERTS, CHUNK)
    tl.debug_barrier()
    _place_pairs(ids, pair, order_ptr, cursor_ptr)


@jit_once_for("num_pairs")
def _count_kernel(
    id_ptr: tl.tensor, cursor_ptr: tl.tensor, num_pairs: tl.tensor, EXPERTS: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Each program counts CHUNK pairs. The cursors, zero before, become the number of pairs of each
    expert."""
    ids = _chosen(id_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), num_pairs)
    counts = tl.histogram(ids, EXPERTS, mask=ids >= 0)
    tl.atomic_add(cursor_ptr + tl.arange(0, EXPERTS), counts, mask=counts > 0)


@jit_once_for("num_blocks")
def _blocks_kernel(
    expert_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    cursor_ptr: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """A single program stores the blocks."""
    counts = tl.load(cursor_ptr + tl.arange(0, EXPERTS))
    _store_blocks(counts, expert_ptr, start_ptr, end_ptr, cursor_ptr, num_blocks, ROWS, EXPERTS, CHUNK)


@jit_once_for("num_pairs")
def _place_kernel(
    id_ptr: tl.tensor, order_ptr: tl.tensor, cursor_ptr: tl.tensor, num_pairs: tl.tensor, CHUNK: tl.constexpr
) -> None:
    """Each program places CHUNK pairs."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    _place_pairs(_chosen(id_ptr, pair, num_pairs), pair, order_ptr, cursor_ptr)


class BlockSizes(NamedTuple):
    """The sizes of the blocks of pairs. rows: the most pairs of a block. chunk: the pairs that one program
    sorts; 0: each pair is a block."""

    rows: int
    num_blocks: int
    chunk: int


def sizes_of_blocks(tokens: int, slots: int, num_experts: int) -> BlockSizes:
    """Returns the sizes of the blocks for the pairs of this number of tokens."""
    pairs = tokens * slots
    if tokens <= MOST_UNSORTED:
        return BlockSizes(_ROWS_OF_ONE, pairs, 0)
    rows = min(max(power_of_two(pairs // num_experts), _LEAST_ROWS), _MOST_ROWS)
    return BlockSizes(rows, pairs // rows + min(pairs, num_experts), min(power_of_two(pairs), _CHUNK))


def arrange_pairs(
    ids: torch.Tensor,  # [tokens, slots] int32; -1: no expert
    num_experts: int,
) -> PairBlocks | None:
    """Returns the pairs in blocks; None if each pair is a block of its own."""
    check_dense(ids)
    rows, num_blocks, chunk = sizes_of_blocks(len(ids), ids.shape[1], num_experts)
    if chunk == 0:
        return None
    num_pairs, experts = ids.numel(), power_of_two(num_experts)
    sizes = [num_pairs, num_blocks, num_blocks, num_blocks, experts]
    order, of_block, starts, ends, cursor = torch.split(ids.new_empty(sum(sizes)), sizes)
    if num_pairs > chunk:
        cursor.zero_()
        programs = (blocks_of(num_pairs, _PART),)
        _count_kernel[programs](ids, cursor, num_pairs, EXPERTS=experts, CHUNK=_PART)
        _blocks_kernel[(1,)](
            of_block, starts, ends, cursor, num_blocks, ROWS=rows, EXPERTS=experts, CHUNK=_PART
        )
        _place_kernel[programs](ids, order, cursor, num_pairs, CHUNK=_PART)
        return PairBlocks(order, of_block, starts, ends)
    overlaps, launch = overlap(ids.device)
    _arrange_kernel[(1,)](
        ids, order, of_block, starts, ends, cursor, num_pairs, num_blocks, ROWS=rows, EXPERTS=experts,
        CHUNK=chunk, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
    )  # fmt: skip
    return PairBlocks(order, of_block, starts, ends)
