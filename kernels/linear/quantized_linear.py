"""A linear layer with 8-bit weights: half the bytes of bfloat16. For drafts, which may be wrong; what the target
computes keeps its full weights.

Either integers with one scale an output: inputs are split into a coarse and a fine integer, 16 bits together, and the
products of integers summed exactly. Or float8_e4m3fn with one scale for all, where inputs are rounded to as many bits:
few rows take the same kernel, more float8_linear.
"""

from __future__ import annotations

import torch

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

_MAX_ROWS, _MAX_FLOAT8_ROWS = 64, 16
_MIN_TILE_ROWS = 16
_OUTPUTS, _INPUTS = 128, 128
# Two programs a multiprocessor: [151680, 4096] takes an H200 147 us for 1 row and 211 for 64, by one with 7 stages 149
# and 215; [151680, 1024] 42 and 87, by one 47 and 100. One where two would have fewer stages than _FEW_STAGES.
_PROGRAMS, _FEW_STAGES = 2, 3
_COARSE = 127.0  # coarse steps from zero to a row's greatest input
_FINE = 254.0  # fine steps in a coarse one: half a coarse step is 127 of them


@jit_once_for("num_rows")
def _split_kernel(
    x_ptr: tl.tensor,
    part_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program a row: x is about step * (coarse + fine / FINE)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_input = column < num_inputs
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_input, other=0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / COARSE
    steps = x / step
    coarse = tl.floor(steps + 0.5)
    fine = tl.floor((steps - coarse) * FINE + 0.5)
    cell_ptr = part_ptr + row * num_inputs + column
    tl.store(cell_ptr, coarse.to(tl.int8), mask=is_input)
    tl.store(cell_ptr + num_rows.to(tl.int64) * num_inputs, fine.to(tl.int8), mask=is_input)
    tl.store(step_ptr + row, step)


@jit
def _round_kernel(
    x_ptr: tl.tensor,
    part_ptr: tl.tensor,
    step_ptr: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program a row: x is about step * part."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_input = column < num_inputs
    step = tl.load(step_ptr)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_input, other=0).to(tl.float32)
    tl.store(part_ptr + row * num_inputs + column, (x / step).to(tl.float8e4nv), mask=is_input)


@jit_once_for("num_rows", "num_outputs")
def _quantized_kernel(
    part_ptr: tl.tensor,
    step_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    FINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program OUTPUTS outputs. A column of the product is a part of a row: of integers the coarse one or the fine
    one, of float8 the only one."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    part = tl.arange(0, PARTS * ROWS)
    # Clamped, not masked: loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    part_row = tl.minimum(part // PARTS, num_rows - 1) + part % PARTS * num_rows
    parts_ptr = part_ptr + part_row[:, None] * num_inputs + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    kind = tl.int32 if PARTS == 2 else tl.float32
    sums = tl.zeros((OUTPUTS, PARTS * ROWS), kind)
    for first in range(0, num_inputs, INPUTS):
        weights = tl.load(weights_ptr + first)
        parts = tl.load(parts_ptr + first)
        sums = tl.dot(weights, tl.trans(parts), sums, out_dtype=kind)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    is_output = output < num_outputs
    if PARTS == 2:
        coarse, fine = tl.split(tl.reshape(sums, (OUTPUTS, ROWS, 2)))
        result = coarse.to(tl.float32) + fine.to(tl.float32) / FINE
        result *= tl.load(scale_ptr + output, mask=is_output, other=0)[:, None]
        result *= tl.load(step_ptr + row, mask=is_row, other=0)[None, :]
    else:
        result = sums * (tl.load(scale_ptr) * tl.load(step_ptr))
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    tl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float; beside integers at most 64 rows on CUDA
    weight: torch.Tensor,  # [outputs, inputs] int8 or float8_e4m3fn
    scales: torch.Tensor,  # [outputs] float32; of float8 [1]
    *,
    step: torch.Tensor | None = None,  # [1] float32, of inputs to float8: x / step is 448 at most
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: (x @ weight.T) * scales, x rounded to 16 bits of its row's greatest, or to float8 times step.

    On CUDA the inputs are a multiple of 128; beside float8, of which a device of compute capability 8.9 or later has
    products, outputs are one of 16.
    """
    assert (step is not None) == (weight.dtype == torch.float8_e4m3fn), "a step is for float8"
    if not takes_triton(x):
        return quantized_linear_twin(x, weight, scales, step=step, out=out)
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert num_inputs % _INPUTS == 0, f"{num_inputs} inputs are no multiple of {_INPUTS}"
    assert x.stride(-1) == 1, f"inputs stand {x.stride(-1)} apart, not side by side"
    check_dense(weight, scales)
    if rows == 0:
        return torch.empty(0, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    overlaps, launch = overlap(x.device)
    block = power_of_two(num_inputs)
    if step is None:
        assert rows <= _MAX_ROWS, f"{rows} rows, at most {_MAX_ROWS}"
        parts = torch.empty(2, rows, num_inputs, dtype=torch.int8, device=x.device)
        step = torch.empty(rows, dtype=torch.float32, device=x.device)
        _split_kernel[(rows,)](
            x, parts, step, rows, num_inputs, x.stride(0),
            COARSE=_COARSE, FINE=_FINE, BLOCK=block, OVERLAPS=overlaps, num_warps=8, **launch,
        )  # fmt: skip
    else:
        parts = torch.empty(1, rows, num_inputs, dtype=weight.dtype, device=x.device)
        _round_kernel[(rows,)](
            x, parts, step, num_inputs, x.stride(0), BLOCK=block, OVERLAPS=overlaps, num_warps=8, **launch
        )
        if rows > _MAX_FLOAT8_ROWS:
            product = float8_linear(parts[0], weight, step, scales, dtype=x.dtype)
            return product if out is None else out.copy_(product)
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    fitting_stages = shared_memory_bytes(x.device) // ((_OUTPUTS + len(parts) * padded_rows) * _INPUTS)
    _quantized_kernel[(blocks_of(num_outputs, _OUTPUTS),)](
        parts, step, weight, scales, result, rows, num_outputs, num_inputs, result.stride(0),
        ROWS=padded_rows, PARTS=len(parts), OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, FINE=_FINE, OVERLAPS=overlaps,
        num_warps=8 if padded_rows == _MAX_ROWS else 4,
        num_stages=max(fitting_stages // _PROGRAMS, min(fitting_stages, _FEW_STAGES), 1), **launch,
    )  # fmt: skip
    return result
