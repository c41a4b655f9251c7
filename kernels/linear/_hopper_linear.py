"""The skinny GEMM on Hopper with its epilogue, which several operations launch: see _hopper_core.py."""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import (
    AHEAD,
    by_rows,
    cells_of,
    close_stream,
    described_rows,
    described_weight,
    inputs_of,
    open_stream,
    stream_constants_of,
    sum_stream,
    sums_of,
)
from headway.kernels.linear._hopper_split_k import forget_arrivals, hand_over, sums_handed_over
from headway.kernels.linear._skinny_core import workspace_of
from headway.kernels.linear.dispatch import TmaGemmConfig
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import gl, gluon_jit_once_for


@gluon_jit_once_for("num_rows", "num_copies", "part_copies")
def _streamed_linear_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    step_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    out_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    arrived_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    num_copies: gl.tensor,
    part_copies: gl.tensor,
    residual_stride: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    STARTS: gl.constexpr,
    UNIT: gl.constexpr,
    UNDER_WAY: gl.constexpr,
    AHEAD: gl.constexpr,
    IS_SCALED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ROUNDS_TWICE: gl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs over one of SPLIT parts of the inputs (split-K). The program of
    the last part adds the partial sums."""
    tile, part = gl.program_id(0) // SPLIT, gl.program_id(0) % SPLIT
    is_last = part == SPLIT - 1
    begin = part * part_copies
    end = gl.where(is_last, num_copies, begin + part_copies)
    first = tile * OUTPUTS
    stream = open_stream(
        x_desc, weight_desc, 0, first, tile, begin, end,
        ROWS, OUTPUTS, INPUTS, 1, 0, STAGES, STARTS, UNIT,
    )  # fmt: skip
    core_layout: gl.constexpr = stream[-1][0].type.layout
    layout: gl.constexpr = by_rows(stream[-1][0], ROWS, OUTPUTS).type.layout
    if HAS_RESIDUAL:
        # The load is issued now, and its result is needed after the sums.
        cell, is_cell = cells_of(tile, num_rows, num_outputs, residual_stride, ROWS, OUTPUTS, layout)
        residual = gl.load(residual_ptr + cell, mask=is_cell & is_last, other=0)
    copies = end - begin
    done = 0
    others = (stream[-1][0],) * (SPLIT - 1)
    if SPLIT > 1:
        done = gl.maximum(copies - AHEAD, 0)
        stream = sum_stream(
            x_desc, weight_desc, stream, 0, first, begin, end, 0, done,
            ROWS, OUTPUTS, INPUTS, 1, 0, STAGES, UNDER_WAY,
        )  # fmt: skip
        if is_last:
            others = sums_handed_over(partial_ptr, arrived_ptr, tile, core_layout, ROWS, OUTPUTS, SPLIT)
    stream = sum_stream(
        x_desc, weight_desc, stream, 0, first, begin, end, done, copies,
        ROWS, OUTPUTS, INPUTS, 1, 0, STAGES, UNDER_WAY,
    )  # fmt: skip
    (sums,) = sums_of(stream, 1)
    if is_last:
        if SPLIT > 1:
            # The parts are added in their order; the program's own part is the last.
            total = others[0]
            for other in gl.static_range(1, SPLIT - 1):
                total += others[other]
            sums = total + sums
        if IS_SCALED:
            sums *= gl.load(step_ptr) * gl.load(scale_ptr)
        if HAS_BIAS:
            output = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, core_layout))
            bias = gl.load(bias_ptr + output, mask=output < num_outputs, other=0)
            sums += bias.to(gl.float32)[:, None]
        if HAS_RESIDUAL and not ROUNDS_TWICE:
            result = by_rows(sums, ROWS, OUTPUTS) + residual.to(gl.float32)
        else:
            # Rounding first halves the bytes that threads exchange.
            result = by_rows(sums.to(out_ptr.dtype.element_ty), ROWS, OUTPUTS).to(gl.float32)
            if HAS_RESIDUAL:
                result += residual.to(gl.float32)
        cell, is_cell = cells_of(tile, num_rows, num_outputs, out_stride, ROWS, OUTPUTS, layout)
        gl.store(out_ptr + cell, result.to(out_ptr.dtype.element_ty), mask=is_cell)
        if SPLIT > 1:
            forget_arrivals(arrived_ptr, tile)
    elif SPLIT > 1:
        hand_over(sums, partial_ptr, arrived_ptr, tile, part, ROWS, OUTPUTS, SPLIT)
    close_stream(stream, STAGES)


def streamed_linear(
    x: torch.Tensor,  # [rows, inputs]
    weight: torch.Tensor,  # [outputs, inputs]
    streams: TmaGemmConfig,  # as `dispatch.choose` gives it
    out: torch.Tensor,  # [rows, outputs], written
    *,
    step: torch.Tensor | None = None,  # [1] float32: a factor of the product
    scale: torch.Tensor | None = None,  # [1] float32: another factor of it
    bias: torch.Tensor | None = None,  # [outputs] float
    residual: torch.Tensor | None = None,  # [rows, outputs] float
) -> None:
    """Writes x @ weight.T * step * scale + bias + residual, as far as these are given. Ordered sums are also
    rounded before the residual is added, as they are if the following norm adds it."""
    rows, num_inputs = x.shape
    assert (step is None) == (scale is None), "step and scale come together"
    # Otherwise the last part could wait for parts that cannot start.
    assert streams.split == 1 or streams.programs <= multiprocessors(x.device)
    _streamed_linear_kernel[(streams.programs,)](
        described_rows(x, streams), described_weight(weight, streams), out if step is None else step,
        out if scale is None else scale, out if bias is None else bias, out if residual is None else residual,
        out, *workspace_of(streams.split, out), rows, weight.shape[0],
        num_inputs // inputs_of(weight, streams), streams.part_copies,
        0 if residual is None else residual.stride(0), out.stride(0), SPLIT=streams.split, AHEAD=AHEAD,
        IS_SCALED=step is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        ROUNDS_TWICE=streams.is_ordered,
        **stream_constants_of(x, streams),
    )  # fmt: skip
