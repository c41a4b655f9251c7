"""A linear layer whose greatest outputs are exact and whose others are approximate, for a quarter of
bfloat16's bytes.

It serves the output layer of drafters. A product with 4-bit weights determines which outputs could be a row's
greatest, given the quantisation errors, and only these are computed again with the full weights. Errors are
assumed to be independent of the inputs, so that an output that is left out is hardly ever the greatest. The
target's products keep their full weights.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.linear.screened_linear import LOOKED_AT, OUTPUTS
from headway.kernels.reference.linear.screened_linear import screened_linear as screened_linear_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)
from headway.kernels.types._int4_packing import NIBBLES

_MAX_ROWS = 32
_MIN_TILE_ROWS = 16
# [151680, 4096] takes an H200 82 us for 1 row; with four stages 88, with four warps 104.
_STAGES, _WARPS = 3, 8
_LARGEST = 127.0
# The tiles that one program searches for outputs to compute exactly, for up to _FEW_ROWS rows and for more;
# the inputs per warp of such a program.
_FEW_ROWS, _SMALL_SHARE, _LARGE_SHARE, _INPUTS_OF_A_WARP = 4, 4, 16, 4096
# The largest relative error of a rounded output.
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@jit_once_for("error_ptr")
def _round_kernel(
    x_ptr: tl.tensor,
    rounded_ptr: tl.tensor,
    step_ptr: tl.tensor,
    error_ptr: tl.tensor,
    spread_ptr: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program quantises one row to int8: x is about step * rounded. error: the factor of an output's
    error in the bound of its product's error, 0 for a row of zeros."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_input = column < num_inputs
    of_weights, of_inputs = tl.load(spread_ptr), tl.load(spread_ptr + 1)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=is_input, other=0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    step = tl.maximum(largest, 1e-30) / LARGEST
    steps = x / step
    tl.store(rounded_ptr + row * num_inputs + column, tl.floor(steps + 0.5).to(tl.int8), mask=is_input)
    tl.store(step_ptr + row, step)
    error = step * tl.sqrt(of_weights * tl.sum(steps * steps, 0) + of_inputs)
    tl.store(error_ptr + row, tl.where(largest > 0, error, 0.0))


@jit
def _low(pairs: tl.tensor, IS_ASSEMBLED: tl.constexpr) -> tl.tensor:
    """Returns int8, 16 times the number in the lower four bits of each byte."""
    if IS_ASSEMBLED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [pairs],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return (pairs << 4).to(tl.int8)


@jit
def _high(pairs: tl.tensor, IS_ASSEMBLED: tl.constexpr) -> tl.tensor:
    """Returns int8, 16 times the number in the upper four bits of each byte."""
    if IS_ASSEMBLED:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [pairs], dtype=tl.int8, is_pure=True, pack=4
        )
    return (pairs & -16).to(tl.int8)


@jit_once_for("num_rows", "num_outputs", "error_ptr", "least_ptr")
def _screen_kernel(
    rounded_ptr: tl.tensor,
    step_ptr: tl.tensor,
    error_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    output_error_ptr: tl.tensor,
    out_ptr: tl.tensor,
    most_ptr: tl.tensor,
    least_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NIBBLES: tl.constexpr,
    IS_ASSEMBLED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS outputs approximately and, for each row, an upper and a lower bound of
    their maximum."""
    place = tl.arange(0, OUTPUTS)
    output = tl.program_id(0) * OUTPUTS + place
    column = tl.arange(0, NIBBLES)
    row = tl.arange(0, ROWS)
    # Rows are clamped instead of masked, so that loads stay plain copies.
    packed_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * (num_inputs // 2)
    packed_at = packed_ptr + packed_row[:, None] + column[None, :]
    rounded_at = rounded_ptr + tl.minimum(row, num_rows - 1)[:, None] * num_inputs + column[None, :]
    is_row, is_output = row < num_rows, output < num_outputs
    scale = tl.load(scale_ptr + output, mask=is_output, other=0)
    output_error = tl.load(output_error_ptr + output, mask=is_output, other=0)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), tl.int32)
    for first in range(0, num_inputs, 2 * NIBBLES):
        pairs = tl.load(packed_at + first // 2)
        low = tl.load(rounded_at + first)
        high = tl.load(rounded_at + first + NIBBLES)
        sums = tl.dot(_low(pairs, IS_ASSEMBLED), tl.trans(low), sums, out_dtype=tl.int32)
        sums = tl.dot(_high(pairs, IS_ASSEMBLED), tl.trans(high), sums, out_dtype=tl.int32)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    step = tl.load(step_ptr + row, mask=is_row, other=0)
    error = tl.load(error_ptr + row, mask=is_row, other=0)
    result = sums.to(tl.float32) * (scale[:, None] * (step / 16)[None, :])
    is_cell = is_row[None, :] & is_output[:, None]
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    tl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_cell)
    off = output_error[:, None] * error[None, :]
    most = tl.max(tl.where(is_cell, result + off, -float("inf")), 0)
    least = tl.max(tl.where(is_cell, result - off, -float("inf")), 0)
    tile = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(most_ptr + tile, most, mask=is_row)
    tl.store(least_ptr + tile, least, mask=is_row)


@jit_once_for("error_ptr", "least_ptr")
def _rescore_kernel(
    x_ptr: tl.tensor,
    error_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_error_ptr: tl.tensor,
    out_ptr: tl.tensor,
    most_ptr: tl.tensor,
    least_ptr: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    tiles: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    TILES: tl.constexpr,
    SHARE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKED_AT: tl.constexpr,
    ROUNDING: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program searches SHARE tiles of one row's outputs and computes exactly those that could be the
    row's greatest. Its tiles are far apart, because the likely tokens mostly have similar ids."""
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.arange(0, TILES)
    bar = tl.max(tl.load(least_ptr + row * tiles + tile, mask=tile < tiles, other=-float("inf")), 0)
    share = tl.program_id(1) + tl.arange(0, SHARE) * tl.num_programs(1)
    most = tl.load(most_ptr + row * tiles + share, mask=share < tiles, other=-float("inf"))
    error = tl.load(error_ptr + row)
    has_some = (most >= tl.where(error > 0, bar, float("inf"))) & (share < tiles)
    column = tl.arange(0, BLOCK)
    is_input = column < num_inputs
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    for _ in range(tl.sum(has_some.to(tl.int32), 0)):
        found = tl.min(tl.where(has_some, share, tiles), 0)
        has_some = has_some & (share != found)
        output = found * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < num_outputs
        about = tl.load(out_ptr + output, mask=is_output, other=0).to(tl.float32)
        off = error * tl.load(output_error_ptr + output, mask=is_output, other=0) + tl.abs(about) * ROUNDING
        could_be = is_output & (about + off >= bar)
        for _ in range(tl.minimum(tl.sum(could_be.to(tl.int32), 0), LOOKED_AT)):
            _, place = tl.max(tl.where(could_be, about, -float("inf")), 0, return_indices=True)
            chosen = found * OUTPUTS + place
            could_be = could_be & (output != chosen)
            weights_at = weight_ptr + chosen.to(tl.int64) * num_inputs + column
            weights = tl.load(weights_at, mask=is_input, other=0).to(tl.float32)
            x = tl.load(x_ptr + column, mask=is_input, other=0).to(tl.float32)
            tl.store(out_ptr + chosen, tl.sum(weights * x, 0).to(out_ptr.dtype.element_ty))


def screened_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] of that dtype
    packed: torch.Tensor,  # [outputs, inputs // 2] int8: of pack_nibbles
    scales: torch.Tensor,  # [outputs] float32: weight is about scale * integer
    errors: torch.Tensor,  # [outputs] float32: standard deviations of weight from that
    spreads: torch.Tensor,  # [2] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns x @ weight.T, [rows, outputs], exact for outputs that could be the greatest of a row, else
    approximate.

    spreads: an output may be off by its error times sqrt(spreads[0] * sum(x ** 2) + spreads[1] * step ** 2).
    x is rounded to multiples of step, which is 1 / 127 of the row's largest absolute value. At most the 8
    greatest of each 128 outputs become exact, which bounds the time. On CUDA there may be at most 32 rows.
    Inputs must be a multiple of 256.
    """
    if not takes_triton(x):
        return screened_linear_twin(x, weight, packed, scales, errors, spreads, out=out)
    (rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    assert num_inputs % (2 * NIBBLES) == 0, f"{num_inputs} inputs are no multiple of {2 * NIBBLES}"
    assert rows <= _MAX_ROWS, f"{rows} rows, at most {_MAX_ROWS}"
    assert x.stride(-1) == 1, f"inputs have a stride of {x.stride(-1)} instead of 1"
    check_dense(weight, packed, scales, errors, spreads)
    assert num_inputs == weight.shape[1] == 2 * packed.shape[1], (x.shape, weight.shape, packed.shape)
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    assert result.stride(-1) == 1, f"outputs have a stride of {result.stride(-1)} instead of 1"
    if rows == 0:
        return result
    device, tiles = x.device, blocks_of(num_outputs, OUTPUTS)
    rounded = torch.empty(rows, num_inputs, dtype=torch.int8, device=device)
    step, error = torch.empty(2, rows, device=device)
    most, least = torch.empty(2, rows, tiles, device=device)
    overlaps, launch = overlap(device)
    block = power_of_two(num_inputs)
    _round_kernel[(rows,)](
        x, rounded, step, error, spreads, num_inputs, x.stride(0),
        LARGEST=_LARGEST, BLOCK=block, OVERLAPS=overlaps, num_warps=8, **launch,
    )  # fmt: skip
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    _screen_kernel[(tiles,)](
        rounded, step, error, packed, scales, errors, result, most, least,
        rows, num_outputs, num_inputs, result.stride(0),
        ROWS=padded_rows, OUTPUTS=OUTPUTS, NIBBLES=NIBBLES, IS_ASSEMBLED=x.is_cuda, OVERLAPS=overlaps,
        num_warps=_WARPS, num_stages=_STAGES, **launch,
    )  # fmt: skip
    share = _SMALL_SHARE if rows <= _FEW_ROWS else _LARGE_SHARE
    _rescore_kernel[(rows, blocks_of(tiles, share))](
        x, error, weight, errors, result, most, least,
        num_outputs, num_inputs, tiles, x.stride(0), result.stride(0),
        TILES=power_of_two(tiles), SHARE=share, OUTPUTS=OUTPUTS, BLOCK=block, LOOKED_AT=LOOKED_AT,
        ROUNDING=_ROUNDING[x.dtype], OVERLAPS=overlaps, num_warps=max(block // _INPUTS_OF_A_WARP, 1), **launch,
    )  # fmt: skip
    return result
