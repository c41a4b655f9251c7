"""The gated GEMM of many rows on Hopper, a persistent kernel: the program of each multiprocessor computes one
tile after another and loads the operands of the next tile while it finishes one. A tile has both gate and
`up`, so that only their product is written.

Written in Gluon, which nothing interprets. Hopper at full load is limited by its power: the library's product
alone is as fast, but the fused activation saves a pass over memory.
"""

from __future__ import annotations

import torch

from headway.kernels.elementwise._gated_product import gluon_gated_product
from headway.kernels.linear._hopper_tiles import next_turn
from headway.kernels.linear.dispatch import GATED_INPUTS as INPUTS
from headway.kernels.linear.dispatch import GATED_OUTPUTS as OUTPUTS
from headway.kernels.linear.dispatch import GATED_ROWS as ROWS
from headway.kernels.linear.dispatch import PAIRED
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import TensorDescriptor, blocks_of, gl, gluon_jit_once_for, hopper, tl
from headway.kernels.types._epilogue import GateActivation

# The weights of this number of output tiles stay in the L2 cache while all rows are multiplied.
_GROUP = 8
_STAGES, _WARPS = 4, 8


@gluon_jit_once_for()
def _fetch(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrival: gl.shared_memory_descriptor,
    inputs: gl.shared_memory_descriptor,  # [ROWS, INPUTS]
    weights: gl.shared_memory_descriptor,  # [OUTPUTS, INPUTS]
    row_tile: gl.tensor,
    tile: gl.tensor,
    copy: gl.tensor,
    exists: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    runs: gl.constexpr = OUTPUTS // (2 * PAIRED)
    hopper.mbarrier.expect(arrival, (ROWS + OUTPUTS) * INPUTS * 2, pred=exists)
    pairs = weights._reinterpret(weights.dtype, [runs, 2, PAIRED, INPUTS], weight_desc.layout)
    corner = [tile * runs, 0, 0, copy * INPUTS]
    hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, pairs, pred=exists)
    hopper.tma.async_copy_global_to_shared(
        x_desc, [row_tile * ROWS, copy * INPUTS], arrival, inputs, pred=exists
    )


@gluon_jit_once_for()
def _place_of(index: gl.tensor, row_tiles: gl.tensor, tiles: gl.tensor, GROUP: gl.constexpr) -> gl.tuple:
    """Returns (tile of rows, tile of outputs). All tiles of rows of GROUP output tiles precede the next
    GROUP."""
    group = index // (GROUP * row_tiles)
    width = gl.maximum(gl.minimum(tiles - group * GROUP, GROUP), 1)  # not 0 after the last tile
    place = index % (GROUP * row_tiles)
    return place // width, group * GROUP + place % width


@gluon_jit_once_for("row_tiles", "tiles", "num_copies")
def _dense_gated_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    out_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    row_tiles: gl.tensor,
    tiles: gl.tensor,
    num_copies: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
) -> None:
    """One program runs on each multiprocessor."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, OUTPUTS, 16]
    )
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    inputs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, INPUTS], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, OUTPUTS, INPUTS], shared)
    results = gl.allocate_shared_memory(x_desc.dtype, [ROWS, OUTPUTS // 2], out_desc.layout)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(arrivals.index(stage), count=1)
    tl.extra.cuda.gdc_wait()
    all_tiles = row_tiles * tiles
    # Copies are issued STAGES - 1 turns before they are multiplied, across the boundary of tiles.
    asked = gl.program_id(0)
    row_tile, tile = _place_of(asked, row_tiles, tiles, GROUP)
    for stage in gl.static_range(STAGES - 1):
        _fetch(
            x_desc, weight_desc, arrivals.index(stage), inputs.index(stage), weights.index(stage), row_tile, tile,
            stage, True, ROWS, OUTPUTS, INPUTS, PAIRED,
        )  # fmt: skip
    copy = STAGES - 1
    free = STAGES - 1
    stage = 0
    parity = 0
    sums = gl.zeros([ROWS, OUTPUTS], gl.float32, layout=layout)
    for index in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        for done in range(num_copies):
            hopper.mbarrier.wait(arrivals.index(stage), parity)
            transposed = weights.index(stage).permute((1, 0))
            sums = hopper.warpgroup_mma(
                inputs.index(stage), transposed, sums, use_acc=done > 0, is_async=True
            )
            # After this the preceding product has ended in all warps, so that its stage is free.
            sums = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[sums])
            tl.debug_barrier()
            if copy == num_copies:
                copy = 0
                asked += gl.num_programs(0)
                row_tile, tile = _place_of(asked, row_tiles, tiles, GROUP)
            _fetch(
                x_desc, weight_desc, arrivals.index(free), inputs.index(free), weights.index(free), row_tile, tile,
                copy, asked < all_tiles, ROWS, OUTPUTS, INPUTS, PAIRED,
            )  # fmt: skip
            copy += 1
            free = stage
            stage, parity = next_turn((stage, parity), STAGES)
        sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[sums])
        runs: gl.constexpr = OUTPUTS // (2 * PAIRED)
        gate, up = gl.split(gl.permute(gl.reshape(sums, [ROWS, runs, 2, PAIRED]), (0, 1, 3, 2)))
        product = gluon_gated_product(gate, up, x_desc.dtype, ACTIVATION)
        result = gl.reshape(product, [ROWS, OUTPUTS // 2])
        hopper.tma.store_wait(pendings=0)
        tl.debug_barrier()
        results.store(result)
        hopper.fence_async_shared()
        tl.debug_barrier()
        own_row_tile, own_tile = _place_of(index, row_tiles, tiles, GROUP)
        corner = [own_row_tile * ROWS, own_tile * (OUTPUTS // 2)]
        hopper.tma.async_copy_shared_to_global(out_desc, corner, results)
    hopper.tma.store_wait(pendings=0)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrivals.index(stage))


def dense_gated_linear(
    x: torch.Tensor,  # [rows, inputs]
    weight: torch.Tensor,  # [2 * outputs, inputs]: gate, then up
    out: torch.Tensor,  # [rows, outputs], written
    activation: GateActivation,
) -> None:
    """Writes activation(x @ gate.T) * (x @ up.T) to out, for shapes that `is_persistent_shape` accepts."""
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0] // 2
    row_tiles, tiles = blocks_of(rows, ROWS), blocks_of(num_outputs, OUTPUTS // 2)
    flat, paired = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 4))
    pairs = [num_outputs // PAIRED, 2, PAIRED, num_inputs]
    strides = [PAIRED * num_inputs, num_outputs * num_inputs, num_inputs, 1]
    _dense_gated_kernel[(min(multiprocessors(x.device), row_tiles * tiles),)](
        TensorDescriptor(x, [rows, num_inputs], [x.stride(0), 1], [ROWS, INPUTS], flat),
        TensorDescriptor(weight, pairs, strides, [OUTPUTS // (2 * PAIRED), 2, PAIRED, INPUTS], paired),
        TensorDescriptor(out, [rows, num_outputs], [out.stride(0), 1], [ROWS, OUTPUTS // 2], flat),
        row_tiles, tiles, num_inputs // INPUTS,
        ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS, PAIRED=PAIRED, GROUP=_GROUP, STAGES=_STAGES,
        ACTIVATION=activation, num_warps=_WARPS, launch_pdl=True,
    )  # fmt: skip
