"""A linear layer with float8_e4m3fn weights, half the bytes of bfloat16, whose inputs are quantised to
float8.

It serves draft models, which may be wrong; the target keeps its full weights. This module's kernel multiplies
few rows, `float8_linear` more.
"""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import shape_of, traits_of
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel, WeightFormat, choose
from headway.kernels.linear.float8_linear import float8_linear
from headway.kernels.reference.linear.quantized_linear import quantized_linear as quantized_linear_twin
from headway.kernels.runtime._device import overlap, shared_memory_bytes
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)

_TILE_ROWS, _OUTPUTS, _INPUTS = 16, 128, 128
# Two programs share a multiprocessor, unless each would then have fewer than _FEW_STAGES stages.
_PROGRAMS, _FEW_STAGES = 2, 3


@jit
def _round_kernel(
    x_ptr: tl.tensor,
    rounded_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program quantises one row: x is about step * rounded."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_input = column < num_inputs
    step = tl.load(step_ptr)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_input, other=0).to(tl.float32)
    tl.store(rounded_ptr + row * num_inputs + column, (x / step).to(tl.float8e4nv), mask=is_input)


@jit_once_for("num_rows", "num_outputs")
def _quantized_kernel(
    rounded_ptr: tl.tensor,
    step_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs of all rows."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    row = tl.arange(0, ROWS)
    # Rows are clamped instead of masked, so that loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    input_row = tl.minimum(row, num_rows - 1)
    inputs_ptr = rounded_ptr + input_row[:, None] * num_inputs + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        weights = tl.load(weights_ptr + first)
        inputs = tl.load(inputs_ptr + first)
        sums = tl.dot(weights, tl.trans(inputs), sums)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    is_row = row < num_rows
    is_output = output < num_outputs
    result = sums * (tl.load(scale_ptr) * tl.load(step_ptr))
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    tl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float; x / step is 448 at most
    weight: torch.Tensor,  # [outputs, inputs] float8_e4m3fn
    scale: torch.Tensor,  # [1] float32
    step: torch.Tensor,  # [1] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns (float8(x / step) * step) @ (weight * scale).T, [rows, outputs] in x's dtype. CUDA devices must
    have compute capability 8.9 or later. Inputs must be a multiple of 128, outputs one of 16."""
    if not takes_triton(x):
        return quantized_linear_twin(x, weight, scale, step, out=out)
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert num_inputs % _INPUTS == 0, f"{num_inputs} inputs are no multiple of {_INPUTS}"
    assert x.stride(-1) == 1, f"inputs have a stride of {x.stride(-1)} instead of 1"
    check_dense(weight, scale)
    if rows == 0:
        return torch.empty(0, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    overlaps, launch = overlap(x.device)
    block = power_of_two(num_inputs)
    rounded = torch.empty(rows, num_inputs, dtype=weight.dtype, device=x.device)
    _round_kernel[(rows,)](
        x, rounded, step, num_inputs, x.stride(0), BLOCK=block, OVERLAPS=overlaps, num_warps=8, **launch
    )
    shape = shape_of(rounded, weight)._replace(format=WeightFormat.FLOAT8_OF_16_BITS)
    if choose(shape, traits_of(x), FusedOperation.ADD).kernel is not LinearKernel.FLOAT8_SKINNY:
        product = float8_linear(rounded, weight, step, scale, dtype=x.dtype)
        return product if out is None else out.copy_(product)
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    fitting_stages = shared_memory_bytes(x.device) // ((_OUTPUTS + _TILE_ROWS) * _INPUTS)
    _quantized_kernel[(blocks_of(num_outputs, _OUTPUTS),)](
        rounded, step, weight, scale, result, rows, num_outputs, num_inputs, result.stride(0),
        ROWS=_TILE_ROWS, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, OVERLAPS=overlaps, num_warps=4,
        num_stages=max(fitting_stages // _PROGRAMS, min(fitting_stages, _FEW_STAGES), 1), **launch,
    )  # fmt: skip
    return result
