"""Products of few rows with a large weight on Hopper, to whose shared memory weights flow by bulk copies.

A program has a multiprocessor to itself and fills it with its first weights before the kernel in front has ended; it
waits for that one only before it asks for inputs. So memory is read while kernels end and start. In Gluon, Triton's lower
level, where copies are asked for and waited for apart. It is not interpreted, and other devices lack some of the
instructions: these take _skinny.py. Knows no operation but the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels._device import is_hopper, multiprocessors, shared_memory_bytes
from headway.kernels._skinny import MAX_ROWS, padded, workspace_of
from headway.kernels._triton import (
    TensorDescriptor,
    blocks_of,
    gl,
    gluon_jit_once_for,
    hopper,
    power_of_two,
    tl,
)

# A copy: the bytes of 256 inputs stand side by side in memory, 64 outputs are what the tensor cores take at once.
_OUTPUTS, _INPUTS = 64, 256
# Gates and ups take turns by eight, so that a tensor core leaves both of a pair in one thread.
_PAIRED, _RUNS = 8, _OUTPUTS // 16
# By so many copies the first of a program's is behind that of its neighbour: not all ask for the same inputs at once.
_LAG = 5
# Measured on the H200: sums of less are not split, since their parts take longer to add up; fewer programs than that
# share of the multiprocessors do not ask for enough at once.
_MIN_COPIES_OF_A_PART, _MIN_SHARE_OF_PROGRAMS = 8, 0.7
_SWIZZLE_BYTES, _ELEMENT_BITS, _WARPS = 128, 16, 4


class Streams(NamedTuple):
    """How a launch is cut. Rows have no part in it, so that a row's result is the same beside any others."""

    programs: int
    split: int  # parts of a sum


@gluon_jit_once_for()
def _fetch_weights(
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrival: gl.shared_memory_descriptor,
    weights: gl.shared_memory_descriptor,  # [OUTPUTS, INPUTS]
    tile: gl.tensor,
    place: gl.tensor,
    exists: gl.tensor,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    if PAIRED > 0:
        # [runs, gate and up, PAIRED, INPUTS] of the weight [runs of all, gate and up, PAIRED, inputs].
        runs: gl.constexpr = OUTPUTS // (2 * PAIRED)
        paired = weights._reinterpret(weights.dtype, [runs, 2, PAIRED, INPUTS], weight_desc.layout)
        corner = [tile * runs, 0, 0, place * INPUTS]
        hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, paired, pred=exists)
    else:
        corner = [tile * OUTPUTS, place * INPUTS]
        hopper.tma.async_copy_global_to_shared(weight_desc, corner, arrival, weights, pred=exists)


@gluon_jit_once_for()
def _sum_products(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    tile: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """[OUTPUTS, ROWS] float32: sums over copies begin .. end - 1. Nothing that a kernel wrote is read before the one in
    front has ended; the next may start from now on."""
    tl.extra.cuda.gdc_launch_dependents()
    weights_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    copy_bytes: gl.constexpr = (OUTPUTS + ROWS) * INPUTS * 2
    weights = gl.allocate_shared_memory(x_desc.dtype, [STAGES, OUTPUTS, INPUTS], weights_layout)
    inputs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, INPUTS], x_desc.layout)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(arrivals.index(stage), count=1)
    copies = end - begin
    first = begin + tile * LAG % copies
    place = first
    for stage in gl.static_range(STAGES):
        arrival = arrivals.index(stage)
        hopper.mbarrier.expect(arrival, copy_bytes, pred=stage < copies)
        _fetch_weights(
            weight_desc, arrival, weights.index(stage), tile, place, stage < copies, OUTPUTS, INPUTS, PAIRED
        )
        place = gl.where(place + 1 == end, begin, place + 1)
    tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(STAGES):
        corner = [0, first * INPUTS]
        hopper.tma.async_copy_global_to_shared(
            x_desc, corner, arrivals.index(stage), inputs.index(stage), pred=stage < copies
        )
        first = gl.where(first + 1 == end, begin, first + 1)
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    stage = 0
    parity = 0
    for copy in range(copies):
        arrival = arrivals.index(stage)
        hopper.mbarrier.wait(arrival, parity)
        transposed = inputs.index(stage).permute((1, 0))
        sums = hopper.warpgroup_mma(weights.index(stage), transposed, sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[sums])
        exists = copy + STAGES < copies
        hopper.mbarrier.expect(arrival, copy_bytes, pred=exists)
        _fetch_weights(
            weight_desc, arrival, weights.index(stage), tile, place, exists, OUTPUTS, INPUTS, PAIRED
        )
        corner = [0, place * INPUTS]
        hopper.tma.async_copy_global_to_shared(x_desc, corner, arrival, inputs.index(stage), pred=exists)
        place = gl.where(place + 1 == end, begin, place + 1)
        is_round = stage == STAGES - 1
        stage = gl.where(is_round, 0, stage + 1)
        parity = gl.where(is_round, parity ^ 1, parity)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(arrivals.index(stage))
    return sums


@gluon_jit_once_for("num_rows", "num_outputs", "num_copies")
def _linear_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    out_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    arrived_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    num_copies: gl.tensor,
    residual_stride: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
) -> None:
    """One program OUTPUTS outputs and one of SPLIT parts of the inputs; the last to arrive adds the parts up."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    tile, part = gl.program_id(0) // SPLIT, gl.program_id(0) % SPLIT
    begin, end = num_copies * part // SPLIT, num_copies * (part + 1) // SPLIT
    sums = _sum_products(x_desc, weight_desc, tile, begin, end, ROWS, OUTPUTS, INPUTS, 0, STAGES, LAG, layout)
    place = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    is_last = True
    if SPLIT > 1:
        cells = partial_ptr + tile * (SPLIT * OUTPUTS * ROWS) + place[:, None] + row[None, :] * OUTPUTS
        gl.store(cells + part * (OUTPUTS * ROWS), sums)
        tl.debug_barrier()
        is_last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
            for other in gl.static_range(SPLIT):
                sums += gl.load(cells + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            gl.store(arrived_ptr + tile, 0)
    if is_last:
        output = tile * OUTPUTS + place
        is_output = output < num_outputs
        if HAS_BIAS:
            sums += gl.load(bias_ptr + output, mask=is_output, other=0).to(gl.float32)[:, None]
        is_cell = (row < num_rows)[None, :] & is_output[:, None]
        if HAS_RESIDUAL:
            residual_cell = residual_ptr + row[None, :] * residual_stride + output[:, None]
            sums += gl.load(residual_cell, mask=is_cell, other=0).to(gl.float32)
        out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
        gl.store(out_cell, sums.to(out_ptr.dtype.element_ty), mask=is_cell)


def streamed_linear(
    x: torch.Tensor,  # [rows, inputs] 16-bit float
    weight: torch.Tensor,  # [outputs, inputs] likewise
    bias: torch.Tensor | None,  # [outputs] likewise
    residual: torch.Tensor | None,  # [rows, outputs] likewise, added
    out: torch.Tensor,  # [rows, outputs] likewise
    streams: Streams,
) -> None:
    """out = x @ weight.T + bias + residual, summed in float32 and rounded once."""
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    weight_desc = _described(weight, list(weight.shape), [num_inputs, 1], [_OUTPUTS, _INPUTS])
    _linear_kernel[(streams.programs,)](
        _described_rows(x), weight_desc, x if bias is None else bias, x if residual is None else residual, out,
        *workspace_of(streams.split, x), rows, num_outputs, num_inputs // _INPUTS,
        0 if residual is None else residual.stride(0), out.stride(0),
        SPLIT=streams.split, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, **_constants_of(x),
    )  # fmt: skip


@gluon_jit_once_for("num_rows", "num_outputs", "num_copies")
def _gate_up_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    num_copies: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
) -> None:
    """One program OUTPUTS rows of the weight: half of them the gate's, half those of `up` that belong to them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    tile = gl.program_id(0)
    sums = _sum_products(
        x_desc, weight_desc, tile, 0, num_copies, ROWS, OUTPUTS, INPUTS, PAIRED, STAGES, LAG, layout
    )
    runs: gl.constexpr = OUTPUTS // (2 * PAIRED)
    gate, up = gl.split(gl.permute(gl.reshape(sums, [runs, 2, PAIRED, ROWS]), (0, 2, 3, 1)))
    result = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [OUTPUTS // 2, ROWS])
    halved: gl.constexpr = result.type.layout
    output = tile * (OUTPUTS // 2) + gl.arange(0, OUTPUTS // 2, layout=gl.SliceLayout(1, halved))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, halved))
    is_cell = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    gl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_cell)


def streamed_gate_up(
    x: torch.Tensor,  # [rows, inputs] 16-bit float
    weight: torch.Tensor,  # [2 * outputs, inputs] likewise: gate, then up
    out: torch.Tensor,  # [rows, outputs] likewise
    streams: Streams,
) -> None:
    """out = silu(x @ gate.T) * (x @ up.T), in float32 and rounded once."""
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0] // 2
    shape = [num_outputs // _PAIRED, 2, _PAIRED, num_inputs]
    strides = [_PAIRED * num_inputs, num_outputs * num_inputs, num_inputs, 1]
    weight_desc = _described(weight, shape, strides, [_RUNS, 2, _PAIRED, _INPUTS])
    _gate_up_kernel[(streams.programs,)](
        _described_rows(x), weight_desc, out, rows, num_outputs, num_inputs // _INPUTS, out.stride(0),
        PAIRED=_PAIRED, **_constants_of(x),
    )  # fmt: skip


def streams_of(x: torch.Tensor, weight: torch.Tensor, *, pairs: bool = False) -> Streams | None:
    """For up to MAX_ROWS rows. None: the device, the type or the weight's shape is not for it. pairs: of a gate and its `up`,
    whose sums are never split."""
    has_type = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype
    if not is_hopper(x.device) or not has_type or x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS:
        return None
    copies, rest = divmod(x.shape[1], _INPUTS)
    has_layout = x.stride(1) == 1 and weight.is_contiguous()
    is_aligned = all(address % 16 == 0 for address in (x.data_ptr(), 2 * x.stride(0), weight.data_ptr()))
    if rest > 0 or copies == 0 or not has_layout or not is_aligned:
        return None
    if pairs and weight.shape[0] % (2 * _PAIRED) > 0:
        return None
    tiles, num_multiprocessors = blocks_of(weight.shape[0], _OUTPUTS), multiprocessors(x.device)
    most = min(num_multiprocessors // tiles, copies // _MIN_COPIES_OF_A_PART) if not pairs else 1
    split = power_of_two(most + 1) // 2 if most > 1 else 1
    is_enough = tiles * split >= _MIN_SHARE_OF_PROGRAMS * num_multiprocessors
    return Streams(tiles * split, split) if is_enough else None


def _constants_of(x: torch.Tensor) -> dict[str, int | bool]:
    """The constants that both kernels share, and the options of the launch."""
    rows = padded(x.shape[0])
    stages = shared_memory_bytes(x.device) // ((_OUTPUTS + rows) * _INPUTS * x.element_size())
    return {
        "ROWS": rows,
        "OUTPUTS": _OUTPUTS,
        "INPUTS": _INPUTS,
        "STAGES": stages,
        "LAG": _LAG,
        "num_warps": _WARPS,
        "launch_pdl": True,
    }


def _described_rows(x: torch.Tensor) -> TensorDescriptor:
    return _described(x, list(x.shape), [x.stride(0), 1], [padded(x.shape[0]), _INPUTS])


def _described(
    tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(_SWIZZLE_BYTES, _ELEMENT_BITS, rank=len(block))
    return TensorDescriptor(tensor, shape, strides, block, layout)
