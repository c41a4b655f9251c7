"""Linear layers of few rows (skinny GEMM), bound by memory bandwidth: see _skinny_core.py, and
_hopper_core.py for Hopper.

PyTorch multiplies more rows, odd shapes and other types.
"""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear._hopper_linear import streamed_linear
from headway.kernels.linear._skinny_core import (
    constants_of,
    cut_of,
    deferred_factor,
    first_weights,
    load_squares,
    reduce_split_k,
    sum_products,
    workspace_of,
)
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel
from headway.kernels.reference.linear.skinny_linear import skinny_linear as skinny_linear_twin
from headway.kernels.runtime._triton import blocks_of, jit_once_for, tl
from headway.kernels.types._deferred_norm import DeferredNorm


@jit_once_for("num_rows", "num_outputs")
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SQUARES: tl.constexpr,
    EPSILON: tl.constexpr,
    OVERLAPS: tl.constexpr,
    DEPENDENTS_AT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs over one of SPLIT parts of the inputs (split-K). The last program
    of a tile to arrive adds the parts and computes the epilogue."""
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output = output < num_outputs
    # Rows are clamped instead of masked, so that loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1)
    weights_ptr = first_weights(weight_ptr, weight_row, num_inputs, part, SPLIT, CUT, FETCHES_AHEAD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if SQUARES > 0:
        squares = load_squares(squares_ptr, num_rows, num_inputs, ROWS, SQUARES)
    sums = sum_products(
        x_ptr, weights_ptr, num_rows, num_inputs, x_stride, part,
        ROWS, OUTPUTS, INPUTS, SPLIT, CUT, OVERLAPS, DEPENDENTS_AT,
    )  # fmt: skip
    sums, is_last = reduce_split_k(sums, partial_ptr, arrived_ptr, tile, part, ROWS, OUTPUTS, SPLIT)
    if is_last:
        if SQUARES > 0:
            sums *= deferred_factor(squares, num_inputs, EPSILON)[None, :]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)[:, None]
        is_cell = (row < num_rows)[None, :] & is_output[:, None]
        if HAS_RESIDUAL:
            residual_cell = residual_ptr + row[None, :] * residual_stride + output[:, None]
            sums += tl.load(residual_cell, mask=is_cell, other=0).to(tl.float32)
        out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
        tl.store(out_cell, sums.to(out_ptr.dtype.element_ty), mask=is_cell)


def skinny_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
    *,
    norm: DeferredNorm | None = None,  # of x
    residual: torch.Tensor | None = None,  # [rows, outputs] float, added
    out: torch.Tensor | None = None,  # [rows, outputs] of x's type; may be the residual
) -> torch.Tensor:
    """Returns x @ weight.T + bias + residual, [rows, outputs], summed in float32 and rounded once.

    No launch that is still running may write the weight, because it may be read before the preceding launch
    has ended.
    """
    operation = FusedOperation.ADD if norm is None else FusedOperation.ADD_DEFERRED
    kernel, streams = choice_of(x, weight, operation)
    if kernel is LinearKernel.LIBRARY:
        return skinny_linear_twin(x, weight, bias, norm=norm, residual=residual, out=out)
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert all(t is None or t.stride(-1) == 1 for t in (bias, residual, out)), (
        "outputs are adjacent in memory"
    )
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    if streams is not None:
        streamed_linear(x, weight, streams, result, bias=bias, residual=residual)
        return result
    cut = cut_of(num_outputs, x)
    _linear_kernel[(blocks_of(num_outputs, cut.outputs) * cut.split,)](
        x, weight, x if bias is None else bias, x if norm is None else norm.squares,
        x if residual is None else residual, result, *workspace_of(cut.split, x),
        rows, num_outputs, num_inputs, x.stride(0), 0 if residual is None else residual.stride(0), result.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        SQUARES=0 if norm is None else norm.squares.shape[1], EPSILON=0.0 if norm is None else norm.epsilon,
        **constants_of(cut, x),
    )  # fmt: skip
    return result
