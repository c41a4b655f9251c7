"""A linear layer of few rows with 8-bit weights and one scale an output: half the bytes of bfloat16.

For drafts, which may be wrong; what the target computes keeps its full weights.
"""

from __future__ import annotations

import torch

from headway.kernels._device import overlaps_launches, shared_memory_bytes
from headway.kernels._triton import blocks_of, check_dense, jit_once_for, power_of_two, takes_triton, tl
from headway.kernels.reference.quantized_linear import quantized_linear as quantized_linear_twin

_MAX_ROWS = 64
_MIN_TILE_ROWS = 16
# Measured on the H200, [151680, 4096]: 229 us for 1 row and 236 us for 16, where bfloat16 takes 289 and 298.
_OUTPUTS, _INPUTS, _STAGES, _WARPS = 64, 128, 8, 4


@jit_once_for("num_rows", "num_outputs")
def _quantized_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program OUTPUTS outputs."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    is_row = row < num_rows
    # Clamped, not masked: the weights' loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    inputs_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        weights = tl.load(weights_ptr + first)
        inputs = tl.load(inputs_ptr + first, mask=is_row[:, None], other=0)
        sums = tl.dot(weights.to(inputs.dtype), tl.trans(inputs), sums, input_precision="ieee")
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    is_output = output < num_outputs
    sums *= tl.load(scale_ptr + output, mask=is_output, other=0)[:, None]
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    tl.store(out_cell, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float, at most 64 rows on CUDA
    weight: torch.Tensor,  # [outputs, inputs] int8
    scales: torch.Tensor,  # [outputs] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: (x @ weight.T) * scales, summed in float32 and rounded once."""
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
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    overlaps = overlaps_launches(x.device)
    stage_bytes = (_OUTPUTS + padded_rows * x.element_size()) * _INPUTS
    _quantized_kernel[(blocks_of(num_outputs, _OUTPUTS),)](
        x, weight, scales, result, rows, num_outputs, num_inputs, x.stride(0), result.stride(0),
        ROWS=padded_rows, OUTPUTS=_OUTPUTS, INPUTS=_INPUTS, OVERLAPS=overlaps, num_warps=_WARPS,
        num_stages=max(min(_STAGES, shared_memory_bytes(x.device) // stage_bytes), 1),
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return result
