"""The core of the skinny GEMMs in Triton: few rows times a large weight, bound by memory bandwidth.

Up to 64 rows the tensor cores wait for memory, so that weights pass through shared memory once, as the first
operand. The split of the sums (split-K) depends on the weight's shape alone, so that a row's result is the
same among up to 32 rows, and among up to 64 if the sums are long. Large weights on Hopper are multiplied by
_hopper_core.py. Knows no operation.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from headway.kernels.linear.dispatch import MAX_ROWS
from headway.kernels.runtime._device import multiprocessors, overlap, shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, jit, power_of_two, tl

_MIN_TILE_ROWS = 16
# Sums are split at multiples of _CUT inputs if their number is one, else at multiples of _MIN_INPUTS.
_CUT, _MIN_INPUTS = 128, 64
# Short sums are not split: their parts would take longer to reduce than to compute.
_MAX_SPLIT, _MIN_CUTS_TO_SPLIT, _MIN_CUTS_OF_A_PART = 8, 16, 4
# If a program sums few inputs, its start dominates: the next kernel is launched _DEPENDENTS_BEFORE_END tiles
# before the end (PDL), and this one prefetches its first weights, _AHEAD inputs of each output, into the L2
# cache while it waits.
_SHORT_SUM, _DEPENDENTS_BEFORE_END, _AHEAD = 2048, 6, 256
_AT_ONCE = 1 << 16
# The most parts of all tiles, 64 outputs x 64 rows each. Sums are split only if all parts run at once, one on
# each multiprocessor.
_MAX_PARTS = 1024


@jit
def _fetch_ahead(weights_ptr: tl.tensor) -> None:
    """Prefetches _AHEAD 16-bit weights from each address into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;", "=r,l", [weights_ptr], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def launch_dependents(is_due: tl.tensor) -> None:
    """Lets the next kernel start (PDL) if it is due."""
    if is_due:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def first_weights(
    weight_ptr: tl.tensor,
    output: tl.tensor,  # [OUTPUTS] int32: rows of the weight
    num_inputs: tl.tensor,
    part: tl.tensor,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> tl.tensor:
    """Returns the addresses of the part's first weights, [OUTPUTS]. It may be called before the preceding
    kernel has ended."""
    weights_ptr = weight_ptr + output.to(tl.int64) * num_inputs + num_inputs // CUT * part // SPLIT * CUT
    if FETCHES_AHEAD:
        _fetch_ahead(weights_ptr)
    return weights_ptr


@jit
def sum_products(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,  # [OUTPUTS], of first_weights
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    part: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    OVERLAPS: tl.constexpr,
    DEPENDENTS_AT: tl.constexpr,
) -> tl.tensor:
    """Returns the part's sums, [OUTPUTS, ROWS] float32. Rows from num_rows on are zeros."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    is_row = row < num_rows
    begin = num_inputs // CUT * part // SPLIT * CUT
    end = num_inputs // CUT * (part + 1) // SPLIT * CUT
    tile_ptr = weights_ptr[:, None] + column[None, :]
    inputs_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
    dependents_at = tl.maximum(begin, end - DEPENDENTS_AT * INPUTS)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(begin, end, INPUTS):
        if OVERLAPS:
            launch_dependents(first == dependents_at)
        weights = tl.load(tile_ptr + (first - begin))
        inputs = tl.load(inputs_ptr + first, mask=is_row[:, None], other=0)
        sums = tl.dot(weights, tl.trans(inputs), sums, input_precision="ieee")
    return sums


@jit
def reduce_split_k(
    sums: tl.tensor,  # [OUTPUTS, ROWS] float32: partial sums
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    tile: tl.tensor,
    part: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (sums, whether they are the tile's): the last of a tile's programs to arrive gets the sums of
    all parts, added in the order of the parts."""
    if SPLIT == 1:
        return sums, True
    cells = _cells(partial_ptr, tile, ROWS, OUTPUTS, SPLIT)
    tl.store(cells + part * (OUTPUTS * ROWS), sums)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for other in tl.static_range(SPLIT):
            sums += tl.load(cells + other * (OUTPUTS * ROWS), cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    return sums, is_last


@jit
def _cells(
    partial_ptr: tl.tensor, tile: tl.tensor, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr
) -> tl.tensor:
    # Adjacent outputs are divided among threads in one way for any ROWS, so that the order in which squares
    # are summed does not depend on ROWS.
    cell = tl.arange(0, OUTPUTS)[:, None] + tl.arange(0, ROWS)[None, :] * OUTPUTS
    return partial_ptr + tile * (SPLIT * OUTPUTS * ROWS) + cell


@jit
def pair_of(place: tl.tensor) -> tl.tensor:
    """Returns the pair of each output of a tile. The outputs of a pair are eight apart, so that the tensor
    cores give both to one thread. Outputs 0 .. 7 and 8 .. 15 of a tile are the first and second outputs of
    the pairs 0 .. 7; the next 16 outputs are the pairs 8 .. 15."""
    return place // 16 * 8 + place % 8


@jit
def is_second(place: tl.tensor) -> tl.tensor:
    """Returns whether each output of a tile is the second of its pair."""
    return place // 8 % 2 == 1


@jit
def split_pairs(
    sums: tl.tensor,  # [OUTPUTS, ROWS]
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the first and the second outputs of the pairs, [OUTPUTS / 2, ROWS] each."""
    first, second = tl.split(tl.permute(tl.reshape(sums, (OUTPUTS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
    return tl.reshape(first, (OUTPUTS // 2, ROWS)), tl.reshape(second, (OUTPUTS // 2, ROWS))


@jit
def load_squares(
    squares_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tensor:
    """Returns the squares of a DeferredNorm, [ROWS, TILES] float32."""
    row, tile = tl.arange(0, ROWS)[:, None], tl.arange(0, TILES)[None, :]
    exists = (row < num_rows) & (tile * 64 < num_inputs)
    return tl.load(squares_ptr + row * TILES + tile, mask=exists, other=0.0)


@jit
def deferred_factor(squares: tl.tensor, num_inputs: tl.tensor, EPSILON: tl.constexpr) -> tl.tensor:
    """Returns the factors of the deferred norm, 1 / rms of each row, [ROWS] float32."""
    return tl.rsqrt(tl.sum(squares, 1) / num_inputs + EPSILON)


class Cut(NamedTuple):
    """The tile of a program, split-K and the pipeline of a launch. Only `split` affects the rounding."""

    outputs: int
    inputs: int
    split: int
    stages: int
    dependents_at: int  # tiles before the end of the sum
    fetches_ahead: bool


def _padded(num_rows: int) -> int:
    return max(power_of_two(num_rows), _MIN_TILE_ROWS)


def cut_of(num_outputs: int, x: torch.Tensor) -> Cut:
    """Returns the tiles of a launch, as measured on an H200: tiles that all run at once share the bandwidth
    evenly."""
    (num_rows, num_inputs), num_multiprocessors = x.shape, multiprocessors(x.device)
    tiles, cut = blocks_of(num_outputs, 64), _cut(num_inputs)
    cuts = num_inputs // cut
    most = min(num_multiprocessors // tiles, cuts // _MIN_CUTS_OF_A_PART, _MAX_SPLIT)
    split = power_of_two(most + 1) // 2 if most > 1 and cuts >= _MIN_CUTS_TO_SPLIT else 1
    part = cuts // split * cut
    is_short = _AHEAD <= part <= _SHORT_SUM
    if _padded(num_rows) == MAX_ROWS:
        return Cut(64, _MIN_INPUTS, split, 8, 8, part >= _AHEAD)
    if tiles > 2 * num_multiprocessors:
        return Cut(128, _MIN_INPUTS, 1, 4, _AT_ONCE, False)
    if cut < _CUT:
        return Cut(64, _MIN_INPUTS, split, 8, _AT_ONCE, False)
    return Cut(64, _CUT, split, 5, _DEPENDENTS_BEFORE_END if is_short else _AT_ONCE, is_short)


def constants_of(cut: Cut, x: torch.Tensor) -> dict[str, int | bool]:
    """Returns the constants that all kernels share, and the options of the launch."""
    rows, (overlaps, launch) = _padded(x.shape[0]), overlap(x.device)
    fitting_stages = shared_memory_bytes(x.device) // ((cut.outputs + rows) * cut.inputs * x.element_size())
    return {
        "ROWS": rows,
        "OUTPUTS": cut.outputs,
        "INPUTS": cut.inputs,
        "SPLIT": cut.split,
        "CUT": _cut(x.shape[1]),
        "OVERLAPS": overlaps,
        "DEPENDENTS_AT": cut.dependents_at,
        "FETCHES_AHEAD": overlaps and cut.fetches_ahead,
        "num_warps": 4,
        "num_stages": min(cut.stages, max(fitting_stages, 1)),
    } | launch


def workspace_of(split: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for partial sums and for the number of written parts of each tile; placeholders if sums
    are not split."""
    return _workspace(x.device) if split > 1 else (x, x)


def reserve_workspace(device: torch.device) -> None:
    """Allocates the workspace of split-K for good. Must precede the capture of graphs with split sums."""
    _workspace(device)


def _cut(num_inputs: int) -> int:
    return _CUT if num_inputs % _CUT == 0 else _MIN_INPUTS


@functools.cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for partial sums and, for each tile, the number of written parts, which is zero between
    launches. All launches use one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a product of split sums must run once on the device before a graph of one is captured"
        )
    partials = torch.empty(_MAX_PARTS * 64 * MAX_ROWS, dtype=torch.float32, device=device)
    return partials, torch.zeros(_MAX_PARTS, dtype=torch.int32, device=device)
