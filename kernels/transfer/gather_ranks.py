"""Gathers the results of the ranks of a model, each of which has its own GPU (all-gather).

A rank writes its part to the memories of the others, block by block, and then a flag for each block. It waits
for each flag in its own memory before it copies that block out. A small part needs no separate flags: each
word of 4 bytes is sent together with its flag as one word of 8 bytes, which arrives whole (as in the LL
protocol of NCCL), so that no rank waits for writes to become visible. The two halves of each memory are used
in turn: a rank begins a gather only when all ranks have begun the preceding one, and so have finished reading
the one before that, which used the same half. All counts are on the device, so that a graph can capture the
gather.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.transfer.gather_ranks import gather_ranks as gather_ranks_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, jit_once_for, takes_triton, tl
from headway.kernels.types._rank_memory import FLAGGED_WORDS, MAX_FLAGGED_PROGRAMS, MAX_PROGRAMS, RankMemory

# Data are moved as integers, so that every dtype works, in the largest unit that divides a row.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES, _WARPS = 8192, 8
_WORD_BYTES, _FLAGGED_WARPS = 4, 4
_MOST_FLAGGED_BYTES = _WORD_BYTES * FLAGGED_WORDS * MAX_FLAGGED_PROGRAMS


@jit_once_for("addresses_ptr", "counts_ptr", "part_bytes", "num_elements")
def _gather_ranks_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rank: tl.tensor,
    part_bytes: tl.tensor,
    num_elements: tl.tensor,
    row: tl.tensor,
    RANKS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes its blocks of elements to all ranks, waits for those of the others and copies them.
    x: [tokens, row]; out: [tokens, RANKS * row]."""
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    number = tl.load(counts_ptr) + 1
    half = RANKS * MAX_PROGRAMS * 8 + number % 2 * RANKS * part_bytes
    first = program * BLOCK
    for start in range(first, num_elements, step):
        element = start + tl.arange(0, BLOCK)
        is_inside = element < num_elements
        values = tl.load(x_ptr + element, mask=is_inside)
        target = element // row * (RANKS * row) + rank * row + element % row
        tl.store(out_ptr + target, values, mask=is_inside)
        for other in tl.static_range(RANKS):
            if other != rank:
                place = tl.load(addresses_ptr + other) + half + rank * part_bytes
                part_ptr = tl.multiple_of(place, 16).to(tl.pointer_type(x_ptr.dtype.element_ty))
                tl.store(part_ptr + element, values, mask=is_inside)
    tl.debug_barrier()  # the flag is written after the data of all threads
    for other in tl.static_range(RANKS):
        if other != rank:
            flags_ptr = tl.load(addresses_ptr + other).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags_ptr + rank * MAX_PROGRAMS + program, number, sem="release", scope="sys")
    own = tl.load(addresses_ptr + rank)
    for other in tl.static_range(RANKS):
        if other != rank:
            flag_ptr = own.to(tl.pointer_type(tl.int64)) + other * MAX_PROGRAMS + program
            # A rank that is ahead may have set the flag of its next gather, whose data are in the other half.
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            while seen < number:
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            tl.debug_barrier()
            place = own + half + other * part_bytes
            part_ptr = tl.multiple_of(place, 16).to(tl.pointer_type(x_ptr.dtype.element_ty))
            for start in range(first, num_elements, step):
                element = start + tl.arange(0, BLOCK)
                is_inside = element < num_elements
                values = tl.load(part_ptr + element, mask=is_inside, cache_modifier=".cg")
                target = element // row * (RANKS * row) + other * row + element % row
                tl.store(out_ptr + target, values, mask=is_inside)
    if tl.atomic_add(counts_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counts_ptr + 1, 0)
        tl.store(counts_ptr, number)


@jit_once_for("addresses_ptr", "counts_ptr", "start", "num_words")
def _gather_flagged_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rank: tl.tensor,
    start: tl.tensor,
    num_words: tl.tensor,
    row: tl.tensor,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program writes its words of 4 bytes to all ranks and reads theirs. x: [tokens, row]; out: [tokens,
    RANKS * row]. start: see RankMemory.flagged_start."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program, place = tl.program_id(0), tl.arange(0, WORDS)
    word = program * WORDS + place
    is_inside = word < num_words
    number = tl.load(counts_ptr + program) + 1
    flag = number.to(tl.int32)
    half = start + number % 2 * (RANKS * PROGRAMS * WORDS * 8)
    values = tl.load(x_ptr + word, mask=is_inside, other=0)
    flagged = (values.to(tl.int64) & 0xFFFFFFFF) | (number << 32)
    for other in tl.static_range(RANKS):
        if other != rank:
            first = tl.load(addresses_ptr + other) + half + (rank * PROGRAMS + program) * (WORDS * 8)
            words_ptr = tl.multiple_of(first, 16).to(tl.pointer_type(tl.int64))
            tl.store(words_ptr + place, flagged)
    target = word // row * (RANKS * row) + word % row
    tl.store(out_ptr + target + rank * row, values, mask=is_inside)
    own = tl.load(addresses_ptr + rank)
    for other in tl.static_range(RANKS):
        if other != rank:
            first = own + half + (other * PROGRAMS + program) * (WORDS * 8)
            words_ptr = tl.multiple_of(first, 16).to(tl.pointer_type(tl.int64))
            seen = tl.load(words_ptr + place, volatile=True)
            # Until a word arrives this half has that of the gather before the last.
            while tl.max(((seen >> 32).to(tl.int32) != flag).to(tl.int32), 0) > 0:
                seen = tl.load(words_ptr + place, volatile=True)
            tl.store(out_ptr + target + other * row, seen.to(tl.int32), mask=is_inside)
    tl.store(counts_ptr + program, number)


def gather_ranks(
    x: torch.Tensor,  # [tokens, n], of this rank
    memory: RankMemory,
) -> torch.Tensor:
    """Returns the results of all ranks in the order of ranks, [tokens, ranks * n]. All ranks must launch it
    with the same shape; a launch ends only when all ranks have launched it."""
    if not takes_triton(x):
        return gather_ranks_twin(x, memory)
    tokens, row = x.shape
    out = torch.empty(tokens, memory.size * row, dtype=x.dtype, device=x.device)
    row_bytes = row * x.element_size()
    if out.numel() == 0:
        return out
    assert row_bytes <= memory.part_bytes, f"{row_bytes} bytes of a token, the most is {memory.part_bytes}"
    if row_bytes % _WORD_BYTES == 0 and x.numel() * x.element_size() <= _MOST_FLAGGED_BYTES:
        own, whole = x.contiguous().view(torch.int32), out.view(torch.int32)
        overlaps, launch = overlap(x.device)
        _gather_flagged_kernel[(blocks_of(own.numel(), FLAGGED_WORDS),)](
            own, whole, memory.addresses, memory.counts[2:], memory.rank, memory.flagged_start, own.numel(),
            own.shape[1], RANKS=memory.size, PROGRAMS=MAX_FLAGGED_PROGRAMS, WORDS=FLAGGED_WORDS, OVERLAPS=overlaps,
            num_warps=_FLAGGED_WARPS, **launch,
        )  # fmt: skip
        return out
    bits = next(size for size in sorted(_BITS, reverse=True) if row_bytes % size == 0)
    own, whole = x.contiguous().view(_BITS[bits]), out.view(_BITS[bits])
    block = _BLOCK_BYTES // bits
    rows = memory.part_bytes // row_bytes
    for part, target in zip(torch.split(own, rows), torch.split(whole, rows), strict=True):
        grid = min(blocks_of(part.numel(), block), MAX_PROGRAMS)
        _gather_ranks_kernel[(grid,)](
            part, target, memory.addresses, memory.counts, memory.rank, memory.part_bytes, part.numel(),
            part.shape[1], RANKS=memory.size, MAX_PROGRAMS=MAX_PROGRAMS, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip
    return out
