"""The skinny GEMM on Hopper with a gated epilogue, which several operations launch: see _hopper_core.py."""

from __future__ import annotations

import torch

from headway.kernels.elementwise._gated_product import gluon_gated_product
from headway.kernels.linear._hopper_core import (
    by_rows,
    cells_of,
    close_stream,
    described_pairs,
    described_rows,
    inputs_of,
    open_stream,
    split_paired,
    stream_constants_of,
    sum_stream,
    sums_of,
)
from headway.kernels.linear.dispatch import PAIRED, TmaGemmConfig
from headway.kernels.runtime._triton import gl, gluon_jit_once_for
from headway.kernels.types._epilogue import GateActivation


@gluon_jit_once_for("num_rows", "num_copies")
def _streamed_gated_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    num_copies: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    TILES: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    STARTS: gl.constexpr,
    UNIT: gl.constexpr,
    UNDER_WAY: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
) -> None:
    """Each program computes TILES x OUTPUTS rows of the weight: half are rows of the gate, half the rows of
    `up` that are paired with them."""
    first_tile = gl.program_id(0) * TILES
    first = first_tile * (OUTPUTS // (2 * PAIRED))
    stream = open_stream(
        x_desc, weight_desc, 0, first, first_tile, 0, num_copies,
        ROWS, OUTPUTS, INPUTS, TILES, PAIRED, STAGES, STARTS, UNIT,
    )  # fmt: skip
    stream = sum_stream(
        x_desc, weight_desc, stream, 0, first, 0, num_copies, 0, num_copies,
        ROWS, OUTPUTS, INPUTS, TILES, PAIRED, STAGES, UNDER_WAY,
    )  # fmt: skip
    sums = sums_of(stream, TILES)
    for tile in gl.static_range(TILES):
        _store_gated(
            sums[tile], first_tile + tile, bias_ptr, out_ptr, num_rows, num_outputs, out_stride,
            ROWS, OUTPUTS, PAIRED, HAS_BIAS, ACTIVATION,
        )  # fmt: skip
    close_stream(stream, STAGES)


@gluon_jit_once_for()
def _store_gated(
    sums: gl.tensor,  # [OUTPUTS, ROWS] float32
    tile: gl.tensor,
    bias_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
) -> None:
    gate, up = split_paired(sums, ROWS, OUTPUTS, PAIRED)
    if HAS_BIAS:
        pair = gl.arange(0, OUTPUTS // 2, layout=gl.SliceLayout(1, gate.type.layout))
        output = tile * (OUTPUTS // 2) + pair
        is_output = output < num_outputs
        gate += gl.load(bias_ptr + output, mask=is_output, other=0).to(gl.float32)[:, None]
        up += gl.load(bias_ptr + num_outputs + output, mask=is_output, other=0).to(gl.float32)[:, None]
    product = gluon_gated_product(gate, up, out_ptr.dtype.element_ty, ACTIVATION)
    result = by_rows(product, ROWS, OUTPUTS // 2)
    layout: gl.constexpr = result.type.layout
    cell, is_cell = cells_of(tile, num_rows, num_outputs, out_stride, ROWS, OUTPUTS // 2, layout)
    gl.store(out_ptr + cell, result, mask=is_cell)


def streamed_gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    streams: TmaGemmConfig,  # as `dispatch.choose` gives it
    activation: GateActivation,
) -> None:
    """Writes activation(x @ gate.T) * (x @ up.T), [rows, outputs], to out."""
    rows, num_inputs = x.shape
    _streamed_gated_kernel[(streams.programs,)](
        described_rows(x, streams), described_pairs(weight, streams, blocks=1), out if bias is None else bias, out, rows, out.shape[1],
        num_inputs // inputs_of(x, streams), out.stride(0), TILES=streams.tiles, PAIRED=PAIRED, HAS_BIAS=bias is not None,
        ACTIVATION=activation, **stream_constants_of(x, streams),
    )  # fmt: skip
