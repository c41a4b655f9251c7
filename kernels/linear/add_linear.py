"""A linear layer with a fused residual addition and the first half of the next RMSNorm."""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear._skinny_core import (
    constants_of,
    cut_of,
    first_weights,
    reduce_split_k,
    sum_products,
    workspace_of,
)
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel
from headway.kernels.reference.linear.add_linear import add_linear as add_linear_twin
from headway.kernels.runtime._triton import blocks_of, jit_once_for, tl
from headway.kernels.types._deferred_norm import DeferredNorm, square_tiles


@jit_once_for("num_rows", "num_outputs")
def _add_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    OVERLAPS: tl.constexpr,
    DEPENDENTS_AT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs over one of SPLIT parts of the inputs (split-K). The last program
    of a tile to arrive adds the parts and computes the epilogue."""
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_row, is_output = row < num_rows, output < num_outputs
    weight_row = tl.minimum(output, num_outputs - 1)
    weights_ptr = first_weights(weight_ptr, weight_row, num_inputs, part, SPLIT, CUT, FETCHES_AHEAD)
    norm_weight = tl.load(norm_ptr + output, mask=is_output, other=0).to(tl.float32)
    if UNIT_OFFSET:
        norm_weight += 1.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    # The load is issued now, and its result is needed after the sums.
    is_cell = is_row[None, :] & is_output[:, None]
    residual_cell = residual_ptr + row[None, :] * residual_stride + output[:, None]
    residual = tl.load(residual_cell, mask=is_cell, other=0)
    sums = sum_products(
        x_ptr, weights_ptr, num_rows, num_inputs, x_stride, part,
        ROWS, OUTPUTS, INPUTS, SPLIT, CUT, OVERLAPS, DEPENDENTS_AT,
    )  # fmt: skip
    sums, is_last = reduce_split_k(sums, partial_ptr, arrived_ptr, tile, part, ROWS, OUTPUTS, SPLIT)
    if is_last:
        if HAS_BIAS:
            sums += bias[:, None]
        total = (sums + residual.to(tl.float32)).to(residual.dtype)
        stream = total.to(tl.float32)
        tl.store(residual_cell, total, mask=is_cell)
        scaled_cell = scaled_ptr + row[None, :] * num_outputs + output[:, None]
        tl.store(scaled_cell, (stream * norm_weight[:, None]).to(residual.dtype), mask=is_cell)
        # This is masked, because outputs beyond the weight repeat its last row.
        squares = tl.sum(tl.where(is_cell, stream * stream, 0.0), 0)
        tl.store(squares_ptr + row * TILES + tile, squares, mask=is_row)


def add_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [hidden, inputs] float
    residual: torch.Tensor,  # [rows, hidden] float, in place: += x @ weight.T
    norm_weight: torch.Tensor,  # [hidden] float: of the next norm
    epsilon: float,
    *,
    bias: torch.Tensor | None = None,  # [hidden] float
    unit_offset: bool = False,  # the norm multiplies by 1 + norm_weight
) -> tuple[torch.Tensor, DeferredNorm]:
    """Adds x @ weight.T + bias to the residual. Returns (the new residual times the norm's weight, [rows,
    hidden], the rest of the norm).

    The new residual and its product with the norm's weight are each rounded once.
    """
    if choice_of(x, weight, FusedOperation.ADD_NORM).kernel is LinearKernel.LIBRARY:
        return add_linear_twin(x, weight, residual, norm_weight, epsilon, bias=bias, unit_offset=unit_offset)
    (rows, num_inputs), hidden = x.shape, weight.shape[0]
    assert residual.stride(1) == norm_weight.stride(0) == 1, "outputs are adjacent in memory"
    assert bias is None or bias.stride(0) == 1, "outputs are adjacent in memory"
    scaled = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    squares = torch.empty(rows, square_tiles(hidden), dtype=torch.float32, device=x.device)
    cut = cut_of(hidden, x)._replace(outputs=64)
    _add_kernel[(blocks_of(hidden, 64) * cut.split,)](
        x, weight, x if bias is None else bias, residual, norm_weight, scaled, squares, *workspace_of(cut.split, x),
        rows, hidden, num_inputs, x.stride(0), residual.stride(0),
        TILES=squares.shape[1], HAS_BIAS=bias is not None, UNIT_OFFSET=unit_offset, **constants_of(cut, x),
    )  # fmt: skip
    return scaled, DeferredNorm(squares, epsilon)
