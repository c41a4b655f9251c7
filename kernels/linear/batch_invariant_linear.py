"""Batch-invariant linear layers: sums have one order, whatever the number of rows.

Weights are the first operand, and products are added from the first input to the last in one float32
accumulator, by one kind of instruction. The tile sizes of a program do not change that order.
"""

from __future__ import annotations

import torch

from headway.kernels.linear._batch_invariant_tiles import FLOAT32_TILE, tile_of
from headway.kernels.reference.linear.batch_invariant_linear import (
    batch_invariant_linear as batch_invariant_linear_twin,
)
from headway.kernels.runtime._device import multiprocessors, overlap, shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, jit_once_for, takes_triton, tl


@jit_once_for("num_rows", "num_outputs")
def _batch_invariant_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs of ROWS rows; neighbouring programs share weights. IS_WHOLE: the
    number of inputs is a multiple of INPUTS."""
    row_tiles = (num_rows + ROWS - 1) // ROWS
    output = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    row = tl.arange(0, ROWS)  # from first_row on
    column = tl.arange(0, INPUTS)
    # Rows are clamped instead of masked, so that loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    input_row = tl.minimum(row, num_rows - 1 - first_row) * x_stride
    inputs_ptr = x_ptr + first_row.to(tl.int64) * x_stride + input_row[:, None] + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        if IS_WHOLE:
            weights = tl.load(weights_ptr + first)
            inputs = tl.load(inputs_ptr + first)
        else:
            exists = (first + column < num_inputs)[None, :]
            weights = tl.load(weights_ptr + first, mask=exists, other=0)
            inputs = tl.load(inputs_ptr + first, mask=exists, other=0)
        sums = tl.dot(weights, tl.trans(inputs), sums, input_precision="ieee")
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    is_output = output < num_outputs
    if HAS_BIAS:
        sums += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)[:, None]
    is_cell = (row < num_rows - first_row)[None, :] & is_output[:, None]
    out_cell = out_ptr + first_row.to(tl.int64) * num_outputs + (row[None, :] * num_outputs + output[:, None])
    tl.store(out_cell, sums.to(out_ptr.dtype.element_ty), mask=is_cell)


def batch_invariant_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, outputs], summed in float32 and rounded once.

    A row's result depends on no other row, not even in its last bit. Float64 is the exception, because
    PyTorch multiplies it.
    """
    if not takes_triton(x) or x.dtype == torch.float64 or x.shape[0] == 0:
        return batch_invariant_linear_twin(x, weight, bias)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.stride(1) == 1, x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert bias is None or bias.is_contiguous(), "the bias has gaps"
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device)
    # The interpreter, which has no bfloat16, uses the tiles of 16-bit types for float32.
    is_float32 = x.is_cuda and x.dtype == torch.float32
    tile = FLOAT32_TILE if is_float32 else tile_of(rows, num_inputs, num_outputs, multiprocessors(x.device))
    tile_bytes = (tile.outputs + tile.rows) * tile.inputs * x.element_size()
    overlaps, launch = overlap(x.device)
    _batch_invariant_kernel[(blocks_of(num_outputs, tile.outputs) * blocks_of(rows, tile.rows),)](
        x, weight, x if bias is None else bias, out, rows, num_outputs, num_inputs, x.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, IS_WHOLE=num_inputs % tile.inputs == 0,
        HAS_BIAS=bias is not None, OVERLAPS=overlaps, num_warps=tile.num_warps,
        num_stages=min(tile.stages, max(shared_memory_bytes(x.device) // tile_bytes, 1)), **launch,
    )  # fmt: skip
    return out
