"""Weight-only quantised GEMM of up to MOST_ROWS rows on Hopper: codes are expanded to bfloat16 in the
registers from which tensor cores read them, so that memory is read for 8 or 4 bits a weight.

One warp copies codes, scales and inputs to shared memory by TMA; it copies codes and scales before the
preceding kernel has ended (PDL). Four warps expand and multiply. The order of codes in memory
(_code_tiles.py) makes exchanges between threads unnecessary. Values have the bits of the expanded weight,
because the product of a code and a bfloat16 scale has few enough bits to be rounded once. Up to
MOST_SYNCHRONOUS_ROWS rows are multiplied by the instructions of older devices, between which the compiler
schedules the expansion; more rows are multiplied by Hopper's own instructions, to the same bits. Knows no
format but codes and scales.
"""

from __future__ import annotations

from typing import Any

import torch

from headway.kernels.elementwise._gated_product import gluon_gated_product
from headway.kernels.linear._hopper_core import (
    by_rows,
    cells_of,
    described_rows,
    fetch_inputs,
    padded_rows,
    split_paired,
)
from headway.kernels.linear._hopper_tiles import next_turn
from headway.kernels.linear.dispatch import PAIRED, TmaGemmConfig
from headway.kernels.runtime._device import shared_memory_bytes
from headway.kernels.runtime._triton import (
    TensorDescriptor,
    constexpr_function,
    gl,
    gluon_jit_once_for,
    hopper,
    mma_v2,
    tl,
)
from headway.kernels.types._code_tiles import CHUNKS, OUTPUTS
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._weights import QuantizedWeight

MOST_ROWS, MOST_SYNCHRONOUS_ROWS = 128, 16
# Inputs that share a scale; inputs that are expanded at once; bytes of a line of codes, of which 16 are a
# chunk.
GROUP, _PIECE, _LINE = 128, 128, 128
_LINES_OF_A_CHUNK = 16
# A program uses at most 1 / _SHARE of the shared memory and _MOST_REGISTERS registers per thread, so that the
# next program, also one of the next kernel, can start while this one runs.
_SHARE, _MOST_REGISTERS, _REGISTERS_OF_COPIES = 2, 128, 24
_MOST_STAGES = 8


@gluon_jit_once_for()
def _expand_float8(codes: gl.tensor, layout: gl.constexpr) -> gl.tensor:
    """codes: [4 * n, 128] uint8. Returns [64, 8 * n] bfloat16, the values of float8_e4m3fn times 2 ** -120:
    the value of a code's bits, also of subnormals, at the boundary of exponent and mantissa of bfloat16."""
    raw = gl.inline_asm_elementwise(
        "{ .reg .b32 l, h, s, t; shl.b32 l, $2, 4; shr.u32 h, $2, 4; shl.b32 s, $2, 8;"
        "and.b32 l, l, 0x07f007f0; and.b32 h, h, 0x07f007f0; and.b32 s, s, 0x80008000;"
        "and.b32 t, $2, 0x80008000; or.b32 $0, l, s; or.b32 $1, h, t; }",
        "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip
    chunks: gl.constexpr = codes.shape[0] // 16
    # c w g(4, 2) q s h r e
    raw = gl.permute(gl.reshape(raw, [chunks, 4, 4, 2, 4, 2, 2, 2, 2]), (1, 7, 2, 3, 0, 5, 6, 4, 8))
    return gl.convert_layout(gl.reshape(raw, [64, chunks * 32]), layout, assert_trivial=True)


@gluon_jit_once_for()
def _expand_int4(codes: gl.tensor, layout: gl.constexpr) -> gl.tensor:
    """codes: [4 * n, 128] uint8. Returns [64, 16 * n] bfloat16, the integers plus 128: they are put into the
    lowest bits of the mantissa of 128."""
    first, second = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c; shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;"
        "lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea; lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;"
        "lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea; lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea; }",
        "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    chunks: gl.constexpr = codes.shape[0] // 16
    # c w g(4, 2) q s r e h
    raw = gl.reshape(gl.join(first, second), [chunks, 4, 4, 2, 4, 4, 2, 2, 2])
    raw = gl.permute(raw, (1, 6, 2, 3, 0, 5, 8, 4, 7))
    return gl.convert_layout(gl.reshape(raw, [64, chunks * 64]), layout, assert_trivial=True)


@gluon_jit_once_for()
def _scaled(values: gl.tensor, scale: gl.tensor) -> gl.tensor:
    """values: [64, n] bfloat16. scale: [64, 1] bfloat16 or float32. Returns the products, rounded to
    bfloat16; with a float32 scale they are computed in float32."""
    if scale.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 l, h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; mul.rn.f32 l, l, $2;"
            "mul.rn.f32 h, h, $3; cvt.rn.bf16x2.f32 $0, h, l; }",
            "=r,r,r,r", [values, scale], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@gluon_jit_once_for()
def _expand(
    codes: gl.tensor,  # [lines, 128] uint8
    scale: gl.tensor,  # [64]
    zero: gl.tensor,  # [64]
    BITS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """Returns the values, [64, inputs] bfloat16."""
    if BITS == 8:
        factor = (scale.to(gl.float32) * 1.329227995784916e36).to(scale.dtype)
        return _scaled(_expand_float8(codes, layout), factor[:, None])
    else:
        values = _expand_int4(codes, layout)
        if HAS_ZEROS:
            base = (zero.to(gl.float32) + 128.0).to(gl.bfloat16)[:, None]
        else:
            base = gl.full([64, 1], 136.0, gl.bfloat16, layout=layout)
        values = gl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, base], dtype=gl.bfloat16, is_pure=True, pack=2
        )
        return _scaled(values, scale[:, None])


@gluon_jit_once_for()
def _fetch_weights(
    code_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    scale_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    zero_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    ring: gl.tuple,
    stage: gl.tensor,
    tile: gl.tensor,
    copy: gl.tensor,
    copies: gl.tensor,
    exists: gl.tensor,
    GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
) -> None:
    _, codes, scales, zeros, full, _ = ring
    arrival = full.index(stage)
    LINES: gl.constexpr = codes.shape[1]
    corner = [(tile * copies + copy) * LINES, 0]
    hopper.tma.async_copy_global_to_shared(code_desc, corner, arrival, codes.index(stage), pred=exists)
    for group in gl.static_range(GROUPS):
        place = stage * GROUPS + group
        corner = [copy * GROUPS + group, tile * 64]
        some = scales.index(place)._reinterpret(scales.dtype, [1, 64], scale_desc.layout)
        hopper.tma.async_copy_global_to_shared(scale_desc, corner, arrival, some, pred=exists)
        if HAS_ZEROS:
            some = zeros.index(place)._reinterpret(zeros.dtype, [1, 64], zero_desc.layout)
            hopper.tma.async_copy_global_to_shared(zero_desc, corner, arrival, some, pred=exists)


@gluon_jit_once_for()
def _copy_tiles(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    code_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    scale_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    zero_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    ring: gl.tuple,
    copies: gl.tensor,
    ROWS: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    inputs, codes, _, _, full, empty = ring
    tile = gl.program_id(0)
    OF_SCALES: gl.constexpr = GROUPS * (1 + HAS_ZEROS) * 64 * (scale_desc.dtype.primitive_bitwidth // 8)
    BYTES: gl.constexpr = codes.shape[1] * 128 + ROWS * INPUTS * 2 + OF_SCALES
    for stage in gl.static_range(STAGES):
        exists = stage < copies
        hopper.mbarrier.expect(full.index(stage), BYTES, pred=exists)
        _fetch_weights(
            code_desc, scale_desc, zero_desc, ring, stage, tile, stage, copies, exists, GROUPS, HAS_ZEROS
        )
    # The wait comes first: see open_stream.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        fetch_inputs(x_desc, full.index(stage), inputs, stage, stage, stage < copies, ROWS, INPUTS)
    stage = 0
    parity = 0
    for copy in range(STAGES, copies):
        hopper.mbarrier.wait(empty.index(stage), parity)
        hopper.mbarrier.expect(full.index(stage), BYTES)
        _fetch_weights(
            code_desc, scale_desc, zero_desc, ring, stage, tile, copy, copies, True, GROUPS, HAS_ZEROS
        )
        fetch_inputs(x_desc, full.index(stage), inputs, stage, copy, True, ROWS, INPUTS)
        stage, parity = next_turn((stage, parity), STAGES)


@gluon_jit_once_for()
def _multiply(
    ring: gl.tuple,
    scale_ptr: gl.tensor,
    zero_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    copies: gl.tensor,
    residual_stride: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    INPUTS: gl.constexpr,
    PIECE: gl.constexpr,
    BITS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    IS_SYNCHRONOUS: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
) -> None:
    inputs, codes, scales, zeros, full, empty = ring
    tile = gl.program_id(0)
    of_sums: gl.constexpr = _layout_of_sums(ROWS, IS_SYNCHRONOUS)
    of_weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_sums, k_width=2)
    of_inputs: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=of_sums, k_width=2)
    by_output: gl.constexpr = gl.SliceLayout(1, of_weights)
    by_thread: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    sums = gl.zeros([64, ROWS], gl.float32, layout=of_sums)
    scale_at = tile * 64 + gl.arange(0, 64, layout=by_output)
    scale = gl.load(scale_ptr + scale_at)
    zero = gl.load(zero_ptr + scale_at) if HAS_ZEROS else scale
    PIECES: gl.constexpr = INPUTS // PIECE
    LINES: gl.constexpr = codes.shape[1] // PIECES
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    stage = 0
    parity = 0
    for _ in range(copies):
        hopper.mbarrier.wait(full.index(stage), parity)
        for piece in gl.static_range(PIECES):
            if GROUPS > 0:
                group = stage * GROUPS + piece * GROUPS // PIECES
                scale = scales.index(group).load(by_output)
                zero = zeros.index(group).load(by_output) if HAS_ZEROS else scale
            some = codes.index(stage).slice(piece * LINES, LINES, dim=0).load(by_thread)
            weights = _expand(some, scale, zero, BITS, HAS_ZEROS, of_weights)
            right = inputs.index(stage).slice(piece * PIECE, PIECE, dim=1).permute((1, 0))
            if IS_SYNCHRONOUS:
                sums = mma_v2(weights, right.load(of_inputs), sums)
            else:
                # No product is running when its stage is released, or when the next stage is expanded: else
                # the compiler would wait after every instruction.
                sums = hopper.warpgroup_mma(weights, right, sums, is_async=True)
                sums = hopper.warpgroup_mma_wait(num_outstanding=int(piece < PIECES - 1), deps=(sums,))
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        stage, parity = next_turn((stage, parity), STAGES)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if PAIRED > 0:
        gate, up = split_paired(sums, ROWS, 64, PAIRED)
        if HAS_BIAS:
            pair = tile * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, gate.type.layout))
            gate += gl.load(bias_ptr + pair).to(gl.float32)[:, None]
            up += gl.load(bias_ptr + num_outputs + pair).to(gl.float32)[:, None]
        result = by_rows(gluon_gated_product(gate, up, dtype, ACTIVATION), ROWS, 32)
        layout: gl.constexpr = result.type.layout
        cell, is_cell = cells_of(tile, num_rows, num_outputs, out_stride, ROWS, 32, layout)
        gl.store(out_ptr + cell, result, mask=is_cell)
    else:
        if HAS_BIAS:
            output = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_sums))
            sums += gl.load(bias_ptr + output).to(gl.float32)[:, None]
        result = by_rows(sums.to(dtype), ROWS, 64)
        by_rows_layout: gl.constexpr = result.type.layout
        if HAS_RESIDUAL:
            cell, is_cell = cells_of(tile, num_rows, num_outputs, residual_stride, ROWS, 64, by_rows_layout)
            residual = gl.load(residual_ptr + cell, mask=is_cell, other=0)
            result = (result.to(gl.float32) + residual.to(gl.float32)).to(dtype)
        cell, is_cell = cells_of(tile, num_rows, num_outputs, out_stride, ROWS, 64, by_rows_layout)
        gl.store(out_ptr + cell, result, mask=is_cell)


@constexpr_function
def _layout_of_sums(rows: int, is_synchronous: bool) -> gl.NVMMADistributedLayout:
    version, shape = ([2, 0], [16, 8]) if is_synchronous else ([3, 0], [16, rows, 16])
    return gl.NVMMADistributedLayout(version=version, warps_per_cta=[4, 1], instr_shape=shape)


@gluon_jit_once_for("num_rows", "copies")
def _quantized_linear_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    code_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    scale_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    zero_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    scale_ptr: gl.tensor,
    zero_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    residual_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_outputs: gl.tensor,
    copies: gl.tensor,
    residual_stride: gl.tensor,
    out_stride: gl.tensor,
    ROWS: gl.constexpr,
    INPUTS: gl.constexpr,
    PIECE: gl.constexpr,
    BITS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    IS_SYNCHRONOUS: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Each program computes 64 outputs. GROUPS: scales per output in a stage; 0: an output has one scale."""
    LINES: gl.constexpr = 64 * INPUTS * BITS // 1024
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    inputs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, INPUTS], swizzled)
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES, LINES, 128], code_desc.layout)
    scales = codes
    zeros = codes
    if GROUPS > 0:
        scales = gl.allocate_shared_memory(scale_desc.dtype, [STAGES * GROUPS, 64], plain)
        zeros = scales
        if HAS_ZEROS:
            zeros = gl.allocate_shared_memory(scale_desc.dtype, [STAGES * GROUPS, 64], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()
    ring = inputs, codes, scales, zeros, full, empty
    gl.warp_specialize(
        [
            (_multiply, (
                ring, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, copies,
                residual_stride, out_stride, ROWS, INPUTS, PIECE, BITS, GROUPS, HAS_ZEROS, IS_SYNCHRONOUS, STAGES, PAIRED,
                HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
            )),
            (_copy_tiles, (
                x_desc, code_desc, scale_desc, zero_desc, ring, copies, ROWS, INPUTS, GROUPS, HAS_ZEROS, STAGES,
            )),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(full.index(stage))
        hopper.mbarrier.invalidate(empty.index(stage))


def streamed_quantized_linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16, up to MOST_ROWS rows
    weight: QuantizedWeight,
    out: torch.Tensor,  # [rows, outputs], or [rows, outputs / 2] with a gate, bfloat16, written
    *,
    bias: torch.Tensor | None = None,  # [outputs] bfloat16, gates before `up` also with a paired weight
    residual: torch.Tensor | None = None,  # [rows, outputs] bfloat16
    gate: GateActivation | None = None,  # the weight's outputs are paired
) -> None:
    """Writes x @ weight.T + bias to out, rounded before the residual is added or the gate is applied."""
    assert weight.is_paired == (gate is not None), "pairs of outputs are for gates"
    (rows, num_inputs), (outputs, _) = x.shape, weight.shape
    constants = quantized_constants_of(rows, weight, shared_memory_bytes(x.device))
    inputs = constants["INPUTS"]
    of_rows = TmaGemmConfig(outputs // OUTPUTS, copy_bytes=inputs * x.element_size(), is_ordered=True)
    lines = weight.codes.view(-1, _LINE)
    of_codes = [inputs // CHUNKS[weight.bits] * _LINES_OF_A_CHUNK, _LINE]
    scales = weight.scales
    zeros = scales if weight.zeros is None else weight.zeros
    plain = gl.NVMMASharedLayout(0, 8 * scales.element_size(), rank=2)

    def of_groups(tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), [outputs, 1], [1, OUTPUTS], plain)

    _quantized_linear_kernel[(outputs // OUTPUTS,)](
        described_rows(x, of_rows),
        TensorDescriptor(lines, list(lines.shape), [_LINE, 1], of_codes, gl.NVMMASharedLayout(128, 8, rank=2)),
        of_groups(scales), of_groups(zeros), scales, zeros,
        out if bias is None else bias, out if residual is None else residual, out,
        rows, out.shape[1], num_inputs // inputs, 0 if residual is None else residual.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACTIVATION=gate, PAIRED=0 if gate is None else PAIRED,
        **constants,
    )  # fmt: skip


def quantized_constants_of(rows: int, weight: QuantizedWeight, shared_bytes: int) -> dict[str, Any]:
    """Returns the constants that depend on sizes, and the options of the launch."""
    padded, num_inputs = padded_rows(rows), weight.shape[1]
    inputs = 2 * GROUP
    if weight.bits == 4 and num_inputs % (4 * GROUP) == 0 and padded < MOST_ROWS:
        inputs = 4 * GROUP
    groups = 0 if len(weight.scales) == 1 else inputs // GROUP
    of_scales = groups * OUTPUTS * weight.scales.element_size() * (1 if weight.zeros is None else 2)
    stage_bytes = OUTPUTS * inputs * weight.bits // 8 + 2 * padded * inputs + of_scales
    is_wide = padded > MOST_ROWS // 4
    # The rest holds the barriers, and the results that threads exchange.
    of_results = 2 * OUTPUTS * padded + 2048
    stages = (shared_bytes // (1 if is_wide else _SHARE) - of_results) // stage_bytes
    return {
        "ROWS": padded,
        "INPUTS": inputs,
        "PIECE": _PIECE,
        "BITS": weight.bits,
        "GROUPS": groups,
        "HAS_ZEROS": weight.zeros is not None,
        "IS_SYNCHRONOUS": padded <= MOST_SYNCHRONOUS_ROWS,
        "STAGES": max(min(stages, _MOST_STAGES), 2),
        "REGISTERS": _REGISTERS_OF_COPIES,
        "num_warps": 4,
        "launch_pdl": True,
    } | ({} if is_wide else {"maxnreg": _MOST_REGISTERS})


@gluon_jit_once_for()
def _expand_kernel(
    code_ptr: gl.tensor,
    scale_ptr: gl.tensor,
    zero_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_outputs: gl.tensor,
    num_inputs: gl.tensor,
    PIECE: gl.constexpr,
    BITS: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    PAIRED: gl.constexpr,
) -> None:
    """Each program expands 64 outputs and PIECE inputs of a weight and writes them in the unpaired order."""
    tile, piece = gl.program_id(1), gl.program_id(0)
    LINES: gl.constexpr = 64 * PIECE * BITS // 1024
    of_sums: gl.constexpr = _layout_of_sums(8, True)
    of_weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_sums, k_width=2)
    by_output: gl.constexpr = gl.SliceLayout(1, of_weights)
    by_thread: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, by_thread))
    byte = gl.arange(0, 128, layout=gl.SliceLayout(0, by_thread))
    first = (tile.to(gl.int64) * (num_inputs // PIECE) + piece) * (LINES * 128)
    codes = gl.load(code_ptr + first + line[:, None] * 128 + byte[None, :])
    group = piece if HAS_GROUPS else 0
    scale_at = group * num_outputs + tile * 64 + gl.arange(0, 64, layout=by_output)
    scale = gl.load(scale_ptr + scale_at)
    zero = gl.load(zero_ptr + scale_at) if HAS_ZEROS else scale
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(_expand(codes, scale, zero, BITS, HAS_ZEROS, of_weights), by_rows)
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_rows))
    output = tile * 64 + place
    if PAIRED > 0:
        pair = tile * 32 + place // (2 * PAIRED) * PAIRED + place % PAIRED
        output = pair + place // PAIRED % 2 * (num_outputs // 2)
    column = piece * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, by_rows))
    gl.store(out_ptr + output.to(gl.int64)[:, None] * num_inputs + column[None, :], values)


def streamed_expansion(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the expanded weight, [outputs, inputs] bfloat16. Requires Hopper."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=weight.codes.device)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _expand_kernel[(inputs // _PIECE, outputs // OUTPUTS)](
        weight.codes, weight.scales, zeros, out, outputs, inputs, PIECE=_PIECE, BITS=weight.bits,
        HAS_GROUPS=len(weight.scales) > 1, HAS_ZEROS=weight.zeros is not None,
        PAIRED=PAIRED if weight.is_paired else 0, num_warps=4,
    )  # fmt: skip
    return out
