"""Linear layers of few rows, at the speed at which the weights can be read.

Up to 64 rows the tensor cores wait for memory: weights stream through shared memory once, as the first operand
of the product. How the sum over the inputs is cut depends on the weight's shape alone, so a row's result is
the same beside any of up to 32 rows, and up to 64 where the sums are long. More rows, odd shapes and other types are
PyTorch's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from headway.kernels._device import multiprocessors, overlaps_launches, shared_memory_bytes
from headway.kernels._triton import blocks_of, jit, jit_once_for, power_of_two, takes_triton, tl
from headway.kernels.reference.skinny_linear import skinny_gate_up as skinny_gate_up_twin
from headway.kernels.reference.skinny_linear import skinny_linear as skinny_linear_twin
from headway.kernels.silu_mul import silu_mul

# Beyond _FEW_ROWS the library is as fast or faster, but for sums more than twice as long as the result is wide.
_FEW_ROWS, _MAX_ROWS = 32, 64
_MIN_TILE_ROWS = 16
# Sums over the inputs are cut at multiples of _CUT where their number allows it, else of _MIN_INPUTS.
_CUT, _MIN_INPUTS = 128, 64
# Short sums are not split: the parts would take longer to add up than to make.
_MAX_SPLIT, _MIN_CUTS_TO_SPLIT, _MIN_CUTS_OF_A_PART = 8, 16, 4
# Where a program sums few inputs, its start weighs: there the next kernel is invited so many tiles before the end,
# and this one has its first weights fetched into the L2 cache, _AHEAD inputs of each output, while it waits.
_SHORT_SUM, _INVITES_BEFORE_END, _AHEAD = 2048, 6, 256
_AT_ONCE = 1 << 16
# Sums are split only where all parts of all tiles, 64 outputs x 64 rows each, run at once: one a multiprocessor.
_MAX_PARTS = 1024


@jit
def _fetch_ahead(weights_ptr: tl.tensor) -> None:
    """_AHEAD 16-bit weights from each address into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;", "=r,l", [weights_ptr], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _invite(is_time: tl.tensor) -> None:
    if is_time:
        tl.extra.cuda.gdc_launch_dependents()


@jit_once_for("num_rows", "num_outputs")
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
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
    OVERLAPS: tl.constexpr,
    INVITES_AT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> None:
    """One program OUTPUTS outputs and one of SPLIT parts of the inputs; the last to arrive adds the parts up."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    is_output = output < num_outputs
    is_row = row < num_rows
    # Clamped, not masked: the weights' loads stay plain copies.
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    weights_ptr = weight_ptr + weight_row[:, None] + column[None, :]
    inputs_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
    begin = num_inputs // CUT * part // SPLIT * CUT
    end = num_inputs // CUT * (part + 1) // SPLIT * CUT
    invites_at = tl.maximum(begin, end - INVITES_AT * INPUTS)
    if FETCHES_AHEAD:
        _fetch_ahead(weight_ptr + weight_row + begin)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(begin, end, INPUTS):
        if OVERLAPS:
            _invite(first == invites_at)
        weights = tl.load(weights_ptr + first)
        inputs = tl.load(inputs_ptr + first, mask=is_row[:, None], other=0)
        sums = tl.dot(weights, tl.trans(inputs), sums, input_precision="ieee")

    is_last = True
    if SPLIT > 1:
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
        tile_ptr = partial_ptr + tile * (SPLIT * OUTPUTS * ROWS) + cell
        tl.store(tile_ptr + part * (OUTPUTS * ROWS), sums)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for other in tl.static_range(SPLIT):
                sums += tl.load(tile_ptr + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias_ptr + output, mask=is_output, other=0).to(tl.float32)[:, None]
        is_cell = is_row[None, :] & is_output[:, None]
        if HAS_RESIDUAL:
            residual_cell = residual_ptr + row[None, :] * residual_stride + output[:, None]
            sums += tl.load(residual_cell, mask=is_cell, other=0).to(tl.float32)
        out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
        tl.store(out_cell, sums.to(out_ptr.dtype.element_ty), mask=is_cell)


class _Tiles(NamedTuple):
    """How a launch is cut. Only `split` has a part in the result's rounding."""

    outputs: int
    inputs: int
    split: int
    stages: int
    invites_at: int  # tiles before the end of the sum
    fetches_ahead: bool


def skinny_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
    *,
    residual: torch.Tensor | None = None,  # [rows, outputs] float, added
    out: torch.Tensor | None = None,  # [rows, outputs]; may be the residual
) -> torch.Tensor:
    """[rows, outputs]: x @ weight.T + bias + residual, summed in float32 and rounded once."""
    if not _is_skinny(x, weight):
        return skinny_linear_twin(x, weight, bias, residual=residual, out=out)
    rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    assert all(t is None or t.stride(-1) == 1 for t in (bias, residual, out)), "outputs stand side by side"
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    tiles = _tiles(num_outputs, num_inputs, padded_rows, multiprocessors(x.device))
    partials, arrived = _workspace(x.device) if tiles.split > 1 else (result, result)
    overlaps = overlaps_launches(x.device)
    _linear_kernel[(blocks_of(num_outputs, tiles.outputs) * tiles.split,)](
        x, weight, x if bias is None else bias, x if residual is None else residual, result, partials, arrived,
        rows, num_outputs, num_inputs, x.stride(0), 0 if residual is None else residual.stride(0), result.stride(0),
        ROWS=padded_rows, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs, SPLIT=tiles.split, CUT=_cut(num_inputs),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        OVERLAPS=overlaps, INVITES_AT=tiles.invites_at, FETCHES_AHEAD=overlaps and tiles.fetches_ahead, num_warps=4,
        num_stages=min(tiles.stages, _fitting_stages(tiles.outputs + padded_rows, tiles.inputs, x)),
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return result


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """16-bit types (the interpreter, which has no bfloat16, takes float32)."""
    has_type = x.dtype in (torch.bfloat16, torch.float16) if x.is_cuda else x.dtype == torch.float32
    most_rows = _MAX_ROWS if weight.shape[1] > 2 * weight.shape[0] else _FEW_ROWS
    has_shape = x.dim() == 2 and 0 < x.shape[0] <= most_rows and x.shape[1] % _MIN_INPUTS == 0
    has_layout = x.stride(-1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    return takes_triton(x) and has_type and has_shape and has_layout


def _fitting_stages(tile_rows: int, tile_inputs: int, x: torch.Tensor) -> int:
    """How many tiles the shared memory holds."""
    return max(shared_memory_bytes(x.device) // (tile_rows * tile_inputs * x.element_size()), 1)


def _cut(num_inputs: int) -> int:
    return _CUT if num_inputs % _CUT == 0 else _MIN_INPUTS


def _tiles(num_outputs: int, num_inputs: int, padded_rows: int, num_multiprocessors: int) -> _Tiles:
    """Measured on the H200. Tiles that are all resident at once share the bandwidth evenly."""
    tiles, cut = blocks_of(num_outputs, 64), _cut(num_inputs)
    cuts = num_inputs // cut
    most = min(num_multiprocessors // tiles, cuts // _MIN_CUTS_OF_A_PART, _MAX_SPLIT)
    split = power_of_two(most + 1) // 2 if most > 1 and cuts >= _MIN_CUTS_TO_SPLIT else 1
    part = cuts // split * cut
    is_short = _AHEAD <= part <= _SHORT_SUM
    if padded_rows == _MAX_ROWS:
        return _Tiles(64, _MIN_INPUTS, split, 8, 8, part >= _AHEAD)
    if tiles > 2 * num_multiprocessors:
        return _Tiles(128, _MIN_INPUTS, 1, 4, _AT_ONCE, False)
    if cut < _CUT:
        return _Tiles(64, _MIN_INPUTS, split, 8, _AT_ONCE, False)
    return _Tiles(64, _CUT, split, 5, _INVITES_BEFORE_END if is_short else _AT_ONCE, is_short)


@functools.cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums and, for each tile, how many have arrived: zero between launches, which use one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("skinny_linear must run once on the device before a graph of it is captured")
    partials = torch.empty(_MAX_PARTS * 64 * _MAX_ROWS, dtype=torch.float32, device=device)
    return partials, torch.zeros(_MAX_PARTS, dtype=torch.int32, device=device)


@jit_once_for("num_rows", "num_outputs")
def _gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    """One program OUTPUTS outputs: the gate's rows of the weight and the rows of `up` side by side."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    is_row = row < num_rows
    gate_row = tl.minimum(output, num_outputs - 1).to(tl.int64) * num_inputs
    gates_ptr = weight_ptr + gate_row[:, None] + column[None, :]
    ups_ptr = gates_ptr + num_outputs.to(tl.int64) * num_inputs
    inputs_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        gate_weights = tl.load(gates_ptr + first)
        up_weights = tl.load(ups_ptr + first)
        inputs = tl.trans(tl.load(inputs_ptr + first, mask=is_row[:, None], other=0))
        gate = tl.dot(gate_weights, inputs, gate, input_precision="ieee")
        up = tl.dot(up_weights, inputs, up, input_precision="ieee")
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    result = gate / (1.0 + tl.exp(-gate)) * up
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    is_cell = is_row[None, :] & (output < num_outputs)[:, None]
    tl.store(out_cell, result.to(out_ptr.dtype.element_ty), mask=is_cell)


def skinny_gate_up(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [2 * outputs, inputs] float: gate, then up
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: silu(x @ gate.T) * (x @ up.T); few rows in float32 and rounded once."""
    if not takes_triton(x):
        return skinny_gate_up_twin(x, weight, out=out)
    if not _is_skinny(x, weight):
        gated = silu_mul(torch.nn.functional.linear(x, weight))
        return gated if out is None else out.copy_(gated)
    rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    result = torch.empty(rows, num_outputs, dtype=x.dtype, device=x.device) if out is None else out
    padded_rows = max(power_of_two(rows), _MIN_TILE_ROWS)
    overlaps = overlaps_launches(x.device)
    stages = min(4, _fitting_stages(2 * 64 + padded_rows, _MIN_INPUTS, x))
    _gate_up_kernel[(blocks_of(num_outputs, 64),)](
        x, weight, result, rows, num_outputs, num_inputs, x.stride(0), result.stride(0),
        ROWS=padded_rows, OUTPUTS=64, INPUTS=_MIN_INPUTS, OVERLAPS=overlaps,
        num_warps=4, num_stages=stages, **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
    return result
