"""Products of few rows with a wide weight of short sums on Hopper, an lm_head of 1,024 inputs: one program a multiprocessor
keeps all rows in shared memory and goes from tile to tile of outputs, whose weights flow in without a break.

Where a tile is a program's all (_streamed.py), short sums are over before the next program's first copies have come. As
there, weights are asked for before the kernel in front has ended, rows behind it, and no launch that is still under way may
write the weight. A sum runs over the inputs from the first to the last, however many rows there are. Knows no operation but
the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.linear._hopper_core import (
    OUTPUTS,
    PAIRED_TYPES,
    Streams,
    by_rows,
    can_copy,
    cells_of,
    described_rows,
    described_weight,
    fetch_inputs,
    padded_rows,
)
from headway.kernels.linear._skinny_core import MAX_ROWS
from headway.kernels.runtime._device import multiprocessors, shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, gl, gluon_jit_once_for, hopper, tl

# Large copies where they divide the sum and there is room for three, else small ones, of which fewer than four ask for too
# little at once.
_COPY_BYTES, _MIN_STAGES, _MAX_STAGES = (512, 256), (3, 4), 12
# Longer sums stream as fast a tile a program.
_MIN_INPUTS, _MANY_INPUTS = 256, 2048
# More than 8 rows of others are written 2 bytes at once: 64 rows of 33800 x 512 21 us, by the library 13. Fewer rows gain
# nothing by it, but all take one kernel.
_OUTPUTS_MULTIPLE = 16
# Of a program's shared memory what holds neither weights nor rows: barriers, and results on their way to memory.
_OTHER_BYTES = 2304
_WARPS = 4


class Residents(NamedTuple):
    """How a launch is cut."""

    programs: int
    copies: int  # of a sum
    copy_bytes: int  # of an output
    stages: int


@gluon_jit_once_for()
def _fetch(
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrivals: gl.shared_memory_descriptor,
    weights: gl.shared_memory_descriptor,  # [STAGES, OUTPUTS, INPUTS]
    stage: gl.tensor,
    tile: gl.tensor,
    num_tiles: gl.tensor,
    copy: gl.tensor,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
) -> None:
    arrival, exists = arrivals.index(stage), tile < num_tiles
    copy_bytes: gl.constexpr = OUTPUTS * INPUTS * weights.dtype.primitive_bitwidth // 8
    hopper.mbarrier.expect(arrival, copy_bytes, pred=exists)
    corner = [tile * OUTPUTS, copy * INPUTS]
    hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, weights.index(stage), pred=exists)


@gluon_jit_once_for("num_rows", "num_tiles")
def _resident_linear_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    num_tiles: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    COPIES: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
) -> None:
    """One program every PROGRAMS-th tile of OUTPUTS outputs, whose sums have COPIES copies of INPUTS inputs."""
    first_tile = gl.program_id(0)
    bits: gl.constexpr = x_desc.dtype.primitive_bitwidth
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits)
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, OUTPUTS, INPUTS], shared)
    inputs = gl.allocate_shared_memory(x_desc.dtype, [COPIES, ROWS, INPUTS], shared)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(arrivals.index(stage), count=1)
        tile = first_tile + stage // COPIES * PROGRAMS
        _fetch(weight_desc, arrivals, weights, stage, tile, num_tiles, stage % COPIES, OUTPUTS, INPUTS)
    rows_arrival = arrivals.index(STAGES)
    hopper.mbarrier.init(rows_arrival, count=1)
    # In this order: see open_stream.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    hopper.mbarrier.expect(rows_arrival, COPIES * ROWS * INPUTS * bits // 8)
    for copy in gl.static_range(COPIES):
        fetch_inputs(x_desc, rows_arrival, inputs, copy, copy, True, ROWS, INPUTS)
    hopper.mbarrier.wait(rows_arrival, 0)
    core_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 256 // bits]
    )
    zeros = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=core_layout)
    layout: gl.constexpr = by_rows(zeros, ROWS, OUTPUTS).type.layout
    stage = 0
    parity = 0
    for tile in range(first_tile, num_tiles, PROGRAMS):
        sums = zeros
        for copy in gl.static_range(COPIES):
            hopper.mbarrier.wait(arrivals.index(stage), parity)
            transposed = inputs.index(copy).permute((1, 0))
            sums = hopper.warpgroup_mma(weights.index(stage), transposed, sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            # Into the place of what has been multiplied.
            later = tile + (copy + STAGES) // COPIES * PROGRAMS
            next_copy = (copy + STAGES) % COPIES
            _fetch(weight_desc, arrivals, weights, stage, later, num_tiles, next_copy, OUTPUTS, INPUTS)
            is_round = stage == STAGES - 1
            stage = gl.where(is_round, 0, stage + 1)
            parity = gl.where(is_round, parity ^ 1, parity)
        result = by_rows(sums.to(out_ptr.dtype.element_ty), ROWS, OUTPUTS)
        cell, is_cell = cells_of(tile, num_rows, num_outputs, out_stride, ROWS, OUTPUTS, layout)
        gl.store(out_ptr + cell, result, mask=is_cell)
    for stage in gl.static_range(STAGES + 1):
        hopper.mbarrier.invalidate(arrivals.index(stage))


def residents_of(x: torch.Tensor, weight: torch.Tensor) -> Residents | None:
    """None: the device, the type, the weight's shape or the number of rows is not for it."""
    if not can_copy(x, weight, PAIRED_TYPES) or x.shape[0] > MAX_ROWS:
        return None
    programs = multiprocessors(x.device)
    is_wide = blocks_of(weight.shape[0], OUTPUTS) > programs
    has_shape = is_wide and weight.shape[0] % _OUTPUTS_MULTIPLE == 0
    if not has_shape or not _MIN_INPUTS <= x.shape[1] < _MANY_INPUTS:
        return None
    sum_bytes = x.shape[1] * x.element_size()
    room = shared_memory_bytes(x.device) - padded_rows(x.shape[0]) * sum_bytes - _OTHER_BYTES
    for copy_bytes, least in zip(_COPY_BYTES, _MIN_STAGES, strict=True):
        copies, rest = divmod(sum_bytes, copy_bytes)
        stages = min(room // (OUTPUTS * copy_bytes), _MAX_STAGES)
        # A tile's copies under way, no more and no less, are slow where they are many: 1 row of 1536 inputs 151 us with 12
        # small ones, 105 with 11.
        stages -= stages == copies
        if rest == 0 and stages >= least:
            return Residents(programs, copies, copy_bytes, stages)
    return None


def resident_linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16 or float16
    weight: torch.Tensor,  # [outputs, inputs] of that type
    residents: Residents,  # of them
    out: torch.Tensor,  # [rows, outputs] of that type, written
) -> None:
    """x @ weight.T, summed in float32 and rounded once."""
    assert out.dtype == x.dtype, (out.dtype, x.dtype)
    streams = Streams(residents.programs, copy_bytes=residents.copy_bytes)
    _resident_linear_kernel[(residents.programs,)](
        described_rows(x, streams), described_weight(weight, streams), out,
        x.shape[0], weight.shape[0], blocks_of(weight.shape[0], OUTPUTS), out.stride(0),
        ROWS=padded_rows(x.shape[0]), OUTPUTS=OUTPUTS, INPUTS=residents.copy_bytes // x.element_size(),
        COPIES=residents.copies, STAGES=residents.stages, PROGRAMS=residents.programs,
        num_warps=_WARPS, launch_pdl=True,
    )  # fmt: skip
