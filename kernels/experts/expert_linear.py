"""The grouped GEMM of a mixture of experts: products of tokens with the experts that they chose.

A program multiplies some outputs of one expert by the pairs of a block. Weights are the first operand, and
products are added from the first input to the last in one float32 accumulator, as in
`batch_invariant_linear`, so that a pair's result is the same to the last bit in any block. Codes are expanded
in registers. They are packed in units of 16 bits, so that the compiler feeds the tensor cores the same inputs
at a time as with unquantised weights.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.elementwise._gated_product import gated_product
from headway.kernels.experts._expert_tiles import tile_of
from headway.kernels.experts._pair_blocks import arrange_pairs, sizes_of_blocks
from headway.kernels.linear._skinny_core import is_second, pair_of, split_pairs
from headway.kernels.reference.experts.expert_linear import expert_linear as expert_linear_twin
from headway.kernels.runtime._device import overlap, shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, jit_once_for, takes_triton, tl
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import GROUP, ExpertMatrix, PairBlocks


@jit
def _float8_of(units: tl.tensor, factors: tl.tensor) -> Any:
    """units: [outputs, 64] int16. Returns (the values of the low codes, those of the high codes),
    bfloat16."""
    scale = factors.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    return tl.inline_asm_elementwise(
        "{ .reg .b32 l, h, s, z; shl.b32 l, $2, 4; and.b32 l, l, 0x07f007f0; shl.b32 s, $2, 8;"
        "lop3.b32 l, s, 0x80008000, l, 0xea; shr.u32 h, $2, 4; and.b32 h, h, 0x07f007f0;"
        "lop3.b32 h, $2, 0x80008000, h, 0xea; mov.b32 z, 0x80008000;"
        "fma.rn.bf16x2 $0, l, $3, z; fma.rn.bf16x2 $1, h, $3, z; }",
        "=r,=r,r,r", [units, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@jit
def _int4_of(units: tl.tensor, factors: tl.tensor) -> Any:
    """units: [outputs, 32] int16. Returns the values of the four codes of a unit, bfloat16, the lowest
    first."""
    scale = factors.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    shift = (factors >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d, o, z; shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12;"
        "mov.b32 o, 0x3f803f80; mov.b32 z, 0x80008000;"
        "lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea; lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;"
        "lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea; lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;"
        "fma.rn.bf16x2 a, a, o, $5; fma.rn.bf16x2 b, b, o, $5; fma.rn.bf16x2 c, c, o, $5; fma.rn.bf16x2 d, d, o, $5;"
        "fma.rn.bf16x2 $0, a, $6, z; fma.rn.bf16x2 $1, b, $6, z; fma.rn.bf16x2 $2, c, $6, z;"
        "fma.rn.bf16x2 $3, d, $6, z; }",
        "=r,=r,=r,=r,r,r,r", [units, shift, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@jit_once_for("num_outputs")
def _expert_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_SORTED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS rows of an expert's weight for the pairs of a block. SLOTS: the pairs
    that share a row of x. IS_WHOLE: the number of inputs is a multiple of INPUTS. BITS: of a weight; 16: it
    is not quantised. UNITS: the units of 128 codes."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    row, column, place = tl.arange(0, ROWS), tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    if IS_SORTED:
        start = tl.load(start_ptr + block)
        count = tl.load(end_ptr + block) - start
        pair = tl.load(order_ptr + start + tl.minimum(row, count - 1))
    else:
        count = 1
        pair = block + row * 0
    if ACTIVATION is None:
        output = tl.program_id(0) * OUTPUTS + place
        weight_row = tl.minimum(output, num_outputs - 1)
        num_weights = num_outputs
    else:
        output = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        first_output = tl.program_id(0) * (OUTPUTS // 2)
        weight_row = tl.minimum(first_output + pair_of(place), num_outputs - 1)
        weight_row += tl.where(is_second(place), num_outputs, 0)
        num_weights = num_outputs * 2
    inputs_ptr = x_ptr + (pair // SLOTS).to(tl.int64)[:, None] * x_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    code_row = (expert * num_weights + weight_row) * (num_inputs * BITS // 16)
    factors_ptr = factor_ptr + expert * (num_inputs // INPUTS) * num_weights + weight_row
    if BITS == 16:
        weights_ptr = weight_ptr + code_row[:, None] + column[None, :]
        inputs_ptr += column[None, :]
        for first in range(0, num_inputs, INPUTS):
            if IS_WHOLE:
                weights = tl.load(weights_ptr + first)
                inputs = tl.load(inputs_ptr + first)
            else:
                exists = (first + column < num_inputs)[None, :]
                weights = tl.load(weights_ptr + first, mask=exists, other=0)
                inputs = tl.load(inputs_ptr + first, mask=exists, other=0)
            sums = tl.dot(weights, tl.trans(inputs), sums, input_precision="ieee")
    else:
        unit = tl.arange(0, UNITS)
        units_ptr = weight_ptr + code_row[:, None] + unit[None, :]
        inputs_ptr += unit[None, :]
        for group in range(num_inputs // INPUTS):
            units = tl.load(units_ptr + group * UNITS)
            factors = tl.load(factors_ptr + group * num_weights)
            first = tl.load(inputs_ptr + group * INPUTS)
            second = tl.load(inputs_ptr + (group * INPUTS + UNITS))
            if BITS == 8:
                weights, more = _float8_of(units, factors)
                sums = tl.dot(weights, tl.trans(first), sums)
                sums = tl.dot(more, tl.trans(second), sums)
            else:
                third = tl.load(inputs_ptr + (group * INPUTS + 2 * UNITS))
                fourth = tl.load(inputs_ptr + (group * INPUTS + 3 * UNITS))
                weights, more, others, last = _int4_of(units, factors)
                sums = tl.dot(weights, tl.trans(first), sums)
                sums = tl.dot(more, tl.trans(second), sums)
                sums = tl.dot(others, tl.trans(third), sums)
                sums = tl.dot(last, tl.trans(fourth), sums)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    is_cell = (row < count)[None, :] & (output < num_outputs)[:, None]
    out_cell = out_ptr + pair.to(tl.int64)[None, :] * num_outputs + output[:, None]
    rounded = sums.to(out_ptr.dtype.element_ty)
    if ACTIVATION is None:
        tl.store(out_cell, rounded, mask=is_cell)
    else:
        first, second = split_pairs(rounded, ROWS, OUTPUTS)
        tl.store(out_cell, gated_product(first, second, ACTIVATION), mask=is_cell)


def expert_linear(
    x: torch.Tensor,  # [tokens or tokens * slots, inputs] float
    weight: ExpertMatrix,
    ids: torch.Tensor,  # [tokens, slots] int32
    *,
    gate: GateActivation | None = None,
    blocks: PairBlocks | None = None,  # of these ids; None: they are computed here
) -> torch.Tensor:
    """Returns [tokens * slots, outputs], or [tokens * slots, outputs / 2] with a gate; the rows of pairs
    without an expert are undefined."""
    if not takes_triton(x) or x.dtype == torch.float64:
        return expert_linear_twin(x, weight, ids, gate=gate, blocks=blocks)
    experts, rows, inputs = weight.shape
    outputs = rows if gate is None else rows // 2
    out = x.new_empty(ids.numel(), outputs)
    if ids.numel() == 0:
        return out
    check_dense(ids, weight.values, *(() if weight.factors is None else (weight.factors,)))
    assert x.stride(1) == 1, x.stride()
    blocks = arrange_pairs(ids, experts) if blocks is None else blocks
    block_rows, num_blocks, _ = sizes_of_blocks(len(ids), ids.shape[1], experts)
    tile = tile_of(block_rows, num_blocks, weight, x, is_gated=gate is not None)
    order, of_block, starts, ends = (ids,) * 4 if blocks is None else blocks
    tile_bytes = (tile.outputs + block_rows) * tile.inputs * x.element_size()
    overlaps, launch = overlap(x.device)
    programs = blocks_of(rows, tile.outputs)
    _expert_kernel[(programs, num_blocks)](
        x, weight.values, ids if weight.factors is None else weight.factors, out, order, of_block, starts, ends, outputs, inputs, x.stride(0),
        SLOTS=ids.numel() // len(x), ROWS=block_rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        IS_SORTED=blocks is not None, IS_WHOLE=inputs % tile.inputs == 0, BITS=weight.bits,
        UNITS=GROUP * weight.bits // 16, ACTIVATION=gate, OVERLAPS=overlaps, num_warps=tile.num_warps,
        num_stages=min(tile.stages, max(shared_memory_bytes(x.device) // tile_bytes, 1)), **launch,
    )  # fmt: skip
    return out
