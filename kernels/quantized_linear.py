"""A linear layer of few rows with 8-bit weights and one scale an output: half the bytes of bfloat16.

For drafts, which may be wrong; what the target computes keeps its full weights. The products are those of 8-bit
integers, summed exactly: a first kernel splits each input into a coarse and a fine integer, 16 bits together.
"""

from __future__ import annotations

import torch

from headway.kernels._device import overlap, shared_memory_bytes
from headway.kernels._triton import blocks_of, check_dense, jit_once_for, power_of_two, takes_triton, tl
from headway.kernels.reference.quantized_linear import quantized_linear as quantized_linear_twin

_MAX_ROWS = 64
_MIN_TILE_ROWS = 16
# Measured on the H200, [151680, 4096]: 148 us for 1 row, 170 for 32, 215 for 64; bfloat16 takes 289, 310 and 315.
_OUTPUTS, _INPUTS, _STAGES = 128, 128, 7
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
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    FINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program OUTPUTS outputs. A column of the product is a row's coarse part, or its fine part."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    part = tl.arange(0, 2 * ROWS)
    is_part = part // 2 < num_rows
    # Clamped, not masked: the weights' loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    part_row = part // 2 + part % 2 * num_rows
    parts_ptr = part_ptr + part_row[:, None] * num_inputs + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, 2 * ROWS), tl.int32)
    for first in range(0, num_inputs, INPUTS):
        weights = tl.load(weights_ptr + first)
        parts = tl.load(parts_ptr + first, mask=is_part[:, None], other=0)
        sums = tl.dot(weights, tl.trans(parts), sums, out_dtype=tl.int32)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    coarse, fine = tl.split(tl.reshape(sums, (OUTPUTS, ROWS, 2)))
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    is_output = output < num_outputs
    result = coarse.to(tl.float32) + fine.to(tl.float32) / FINE
    result *= tl.load(scale_ptr + output, mask=is_output, other=0)[:, None]
    result *= tl.load(step_ptr + row, mask=is_row, other=0)[None, :]
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    tl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float, at most 64 rows on CUDA
    weight: torch.Tensor,  # [outputs, inputs] int8
    scales: torch.Tensor,  # [outputs] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: (x @ weight.T) * scales, x rounded to 16 bits of its row's greatest."""
    if not takes_triton(x):
        return quantized_linear_twin(x, weight, scales, out=out)
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert rows <= _MAX_ROWS, f"{rows} rows, at most {_MAX_ROWS}"
    assert num_inputs % _INPUTS == 0, f"{num_inputs} inputs are no multiple of {_INPUTS}"
    assert x.stride(-1) == 1, f"inputs stand {x.stride(-1)} apart, not side by side"
    check_dense(weight, scales)
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return result
    parts = torch.empty(2, rows, num_inputs, dtype=torch.int8, device=x.device)
    steps = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    overlaps, launch = overlap(x.device)
    _split_kernel[(rows,)](
        x, parts, steps, rows, num_inputs, x.stride(0),
        COARSE=_COARSE, FINE=_FINE, BLOCK=power_of_two(num_inputs), OVERLAPS=overlaps, num_warps=8, **launch,
    )  # fmt: skip
    stage_bytes = (_OUTPUTS + 2 * padded_rows) * _INPUTS
    _quantized_kernel[(blocks_of(num_outputs, _OUTPUTS),)](
        parts, steps, weight, scales, result, rows, num_outputs, num_inputs, result.stride(0),
        ROWS=padded_rows, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, FINE=_FINE, OVERLAPS=overlaps,
        num_warps=8 if padded_rows == _MAX_ROWS else 4,
        num_stages=max(min(_STAGES, shared_memory_bytes(x.device) // stage_bytes), 1), **launch,
    )  # fmt: skip
    return result
