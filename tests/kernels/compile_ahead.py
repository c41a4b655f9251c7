"""Compiles every kernel for one NVIDIA architecture without a GPU; fails where registers spill, where the
threads of a warp may disagree about a sum, or where windows wait for the kernel in front before they have to.

python -P tests/kernels/compile_ahead.py 90 [--each-once] [operation ...]

--each-once: the first case alone of every kernel.

For Blackwell Triton 3.7 has the assembler allocate registers anew (--regAllocOptLevel=2, around a fault of
ptxas 13), which spills a few of kernels that fit: these may spill TOLERATED_BYTES, and nothing without that
option.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

import headway.kernels
from headway.kernels.runtime._triton import warps_of

VECTOR = "*i64"
HOPPER = {"least_capability": 90, "most_capability": 90}
TOLERATED_BYTES = 128
KERNELS = Path(headway.kernels.__file__).parent
MODULES = {p.stem: f"headway.kernels.{p.parent.name}.{p.stem}" for p in KERNELS.glob("*/*.py")}


class Case(NamedTuple):
    """A kernel with the types of its arguments, those that are no i32."""

    op: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    tolerated_bytes: int = 0  # of registers spilled
    least_capability: int = 80
    most_capability: int = 100


def pointers(names: str, kind: str = VECTOR) -> dict[str, str]:
    return {f"{name}_ptr": kind for name in names.split()}


def bytes_of(kind: str) -> int:
    return 1 if kind == "fp8e4nv" else 2


def descriptor(kind: str, *block: int, swizzle: int = 128) -> str:
    """The type of a descriptor of bulk copies."""
    bits = {"u8": 8, "fp32": 32}.get(kind, 8 * bytes_of(kind))
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
    return f"tensordesc<{kind}{list(block)},{layout!r}>"


SAMPLING = (
    pointers("position top_k seed out")
    | {"broken_ptr": "*i1", "only_ptr": "*i1"}
    | pointers("list id arrived", "*i32")
)
SAMPLING |= pointers("temperature top_p min_p highest score top near value", "*fp32")
LOGITS = ("vocab_size",)
PROCESSORS = pointers("out penalty bias", "*fp32") | pointers("is_used is_in_prompt", "*i1")
PROCESSORS |= pointers("token_count", "*i32")
SEARCH = {"CHUNK": 2048, "RUN": 64, "PIECE": 512, "OVERLAPS": True}
PICK = SEARCH | {"PAIRED": 128, "LISTED": 32, "FEW": 8192, "UNIT": 16, "TESTED": 64}
PICK |= {"BLOCK": 1024}
ATTENTION = pointers("query key value out", "*bf16") | pointers("acc m l", "*fp32")
ATTENTION |= {"table_ptr": "*i32", "start_ptr": VECTOR, "end_ptr": VECTOR}
ATTENTION |= {
    "scale": "fp32",
    "slope": "fp32",
    "tile_time": "fp32",
    "sum_time": "fp32",
    "quad_sum_time": "fp32",
}
# Full attention, and what a layer may have besides.
FULL = {"slope": None, "sliding_window": None}
RULES = {"full": FULL, "window": {"slope": None}, "soft cap": {"sliding_window": None}, "both": {}}
STRIDES = tuple(f"{name}_stride" for name in ("block", "token", "head", "table", "x", "out", "residual"))
STRIDES += tuple(
    f"{tensor}_{axis}_stride" for tensor in ("query", "out") for axis in ("row", "place", "head")
)
STRIDES += ("num_inputs",)
STREAMED_BY_COPIES = (*STRIDES, "num_outputs")
ACTIVATIONS = ("silu", "gelu_tanh")
PIECES = {"BLOCK_SIZE": 16, "ROWS": 64, "HAS_ENDS": True}


def linear(kind: str) -> dict[str, str]:
    types = pointers("x weight bias residual out norm scaled query key_cache value_cache", f"*{kind}")
    return (
        types
        | pointers("partial squares table step scale", "*fp32")
        | pointers("position slot")
        | {"arrived_ptr": "*i32"}
    )


def streamed_by_copies(
    kind: str, inputs: int, rows: int, *, split: int = 1, under_way: int = 1, outputs: int = 64
) -> dict[str, int]:
    """As stream_constants_of has them; products of up to 32 rows are under way where programs follow one
    another."""
    starts = 1 if outputs < 64 else 16 if rows > 64 else 4 if split == 1 else 6
    tiles = {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs}
    copies = {"UNIT": 512 // (inputs * bytes_of(kind)), "STARTS": starts, "AHEAD": 3}
    return tiles | copies | {"UNDER_WAY": under_way}


def streamed_linear(
    kind: str,
    rows: int,
    inputs: int,
    stages: int,
    split: int,
    under_way: int = 1,
    outputs: int = 64,
    **added: bool,
) -> Case:
    return Case(
        "_hopper_linear",
        "_streamed_linear_kernel",
        linear("bf16" if kind == "fp8e4nv" else kind)
        | {
            "x_desc": descriptor(kind, 2, rows // 2, inputs),
            "weight_desc": descriptor(kind, outputs, inputs),
        },
        streamed_by_copies(kind, inputs, rows, split=split, under_way=under_way, outputs=outputs)
        | {"STAGES": stages, "SPLIT": split, "HAS_BIAS": True, "ROUNDS_TWICE": outputs < 64}
        | added,
        divisible=STREAMED_BY_COPIES,
        **HOPPER,
    )


def quantized_linear(
    rows: int, bits: int, inputs: int, stages: int, scale: str, activation: str | None = None, **added: Any
) -> Case:
    """As quantized_constants_of has them."""
    descriptors = {
        "x_desc": descriptor("bf16", 2, rows // 2, inputs),
        "code_desc": descriptor("u8", 64 * inputs * bits // 1024, 128),
        "scale_desc": descriptor(scale, 1, 64, swizzle=0),
        "zero_desc": descriptor(scale, 1, 64, swizzle=0),
    }
    constants = {
        "ROWS": rows, "INPUTS": inputs, "PIECE": 128, "BITS": bits, "GROUPS": inputs // 128, "HAS_ZEROS": False,
        "IS_SYNCHRONOUS": rows <= 16, "STAGES": stages, "PAIRED": 0 if activation is None else 8, "HAS_BIAS": True,
        "HAS_RESIDUAL": activation is None, "ACTIVATION": activation, "REGISTERS": 24,
    }  # fmt: skip
    return Case(
        "_hopper_quantized",
        "_quantized_linear_kernel",
        linear("bf16") | pointers("scale zero", f"*{scale}") | descriptors,
        constants | added,
        divisible=("num_outputs", "residual_stride", "out_stride"),
        **HOPPER,
    )


def expert_linear(
    rows: int, bits: int, activation: str | None = None, *, small: bool = False, **added: Any
) -> Case:
    """As `expert_linear` launches it."""
    is_few = rows <= 32
    inputs = 128 if is_few or bits < 16 else 64
    constants = {
        "SLOTS": 9, "ROWS": rows, "OUTPUTS": 64 if small else 128, "INPUTS": inputs, "IS_SORTED": rows > 8,
        "IS_WHOLE": True, "BITS": bits, "UNITS": 8 * bits, "ACTIVATION": activation, "OVERLAPS": True,
    }  # fmt: skip
    return Case(
        "expert_linear",
        "_expert_kernel",
        pointers("x out", "*bf16")
        | {"weight_ptr": "*bf16" if bits == 16 else "*i16"}
        | pointers("factor order expert start end", "*i32"),
        constants | added,
        8 if not is_few and activation else 4,
        5 if small else 3 if is_few or bits < 16 else 4,
        divisible=("num_inputs", "x_stride"),
        tolerated_bytes=96 if bits == 4 else 0,
    )


def rms_norm(kind: str, out_kind: str, block: int, **constants: Any) -> Case:
    types = pointers("x residual weight", kind) | pointers("out", out_kind)
    usual = {"EPSILON": 1e-5, "SCALE": 1.0, "HAS_RESIDUAL": True, "HAS_IDS": False, "UNIT_OFFSET": False}
    usual |= {"HAS_STEP": False, "SLOTS": 0, "BLOCK": block, "OVERLAPS": True}
    return Case(
        "rms_norm",
        "_norm_kernel",
        types | pointers("id") | pointers("step share", "*fp32"),
        usual | constants,
        num_warps=warps_of(block),
    )


LINEAR = linear("bf16")
SPANS = pointers("id row first length") | {"generated_ptr": "*i1"}
DELTA = ("key_dim", "value_dim", "query_size", "kept_size", "mixed_stride", "gate_stride")
STREAMED = {"CUT": 128, "OVERLAPS": True, "DEPENDENTS_AT": 6, "FETCHES_AHEAD": True}
BOOKKEEPING = {"BLOCK_SIZE": 16, "ROWS": 128}
CASES = [
    *(
        case
        for bits in (16, 8, 4)
        for case in (
            *(
                expert_linear(8, bits, activation, small=small)
                for small in (True, False)
                for activation in ("silu", None)
            ),
            expert_linear(16, bits, "silu"),
            expert_linear(32, bits, "gelu_tanh"),
            *(expert_linear(64, bits, activation) for activation in ("silu", None)),
        )
    ),
    expert_linear(16, 16, "silu", IS_WHOLE=False),
    Case(
        "choose_experts",
        "_choose_kernel",
        pointers("logit", "*bf16") | pointers("slot") | {"id_ptr": "*i32", "weight_ptr": "*fp32"},
        {
            "TOP_K": 8,
            "NORMALISES": True,
            "HAS_SHARED": True,
            "HAS_SLOTS": True,
            "BLOCK": 256,
            "SLOTS": 16,
            "OVERLAPS": True,
        },
        1,
    ),
    Case(
        "_pair_blocks",
        "_arrange_kernel",
        pointers("id order expert start end cursor", "*i32"),
        {"ROWS": 16, "EXPERTS": 512, "CHUNK": 8192, "OVERLAPS": True},
        16,
    ),
    *(
        Case(
            "_pair_blocks",
            f"_{kernel}_kernel",
            pointers("id order expert start end cursor", "*i32"),
            {"CHUNK": 1024}
            | ({} if kernel == "place" else {"EXPERTS": 512})
            | ({"ROWS": 64} if kernel == "blocks" else {}),
        )
        for kernel in ("count", "blocks", "place")
    ),
    rms_norm("*bf16", "*bf16", 4096, EPSILON=1e-6, UNIT_OFFSET=True, SLOTS=11)._replace(
        divisible=("hidden", "x_stride", "residual_stride", "out_stride")
    ),
    Case(
        "sum_experts",
        "_sum_kernel",
        pointers("result out", "*bf16") | {"weight_ptr": "*fp32"},
        {"SLOTS": 9, "BLOCK": 1024, "OVERLAPS": True},
        divisible=("hidden",),
    ),
    quantized_linear(8, 8, 256, 5, "bf16"),
    quantized_linear(8, 4, 512, 4, "bf16"),
    quantized_linear(8, 8, 256, 5, "fp32", GROUPS=0),
    quantized_linear(8, 4, 512, 4, "bf16", "silu"),
    quantized_linear(16, 4, 512, 3, "fp32", HAS_ZEROS=True),
    quantized_linear(32, 8, 256, 3, "bf16", "gelu_tanh"),
    quantized_linear(64, 8, 256, 4, "fp32"),
    quantized_linear(128, 8, 256, 2, "bf16", "silu"),
    quantized_linear(128, 4, 256, 2, "bf16", HAS_ZEROS=True),
    *(
        Case(
            "_hopper_quantized",
            "_expand_kernel",
            {"code_ptr": "*u8", "out_ptr": "*bf16"} | pointers("scale zero", f"*{scale}"),
            {"PIECE": 128, "BITS": bits, "HAS_GROUPS": True, "HAS_ZEROS": bits == 4, "PAIRED": paired},
            divisible=("num_outputs", "num_inputs"),
            **HOPPER,
        )
        for bits, scale, paired in ((8, "bf16", 8), (4, "fp32", 0))
    ),
    *(
        Case(
            "_split_kv_partial",
            "_partial_kernel",
            ATTENTION,
            PIECES
            | {"GQA_GROUP_SIZE": 4, "KV_HEADS": 8, "PARTS": 1}
            | {"HEAD_DIM": head_dim, "QUERIES": queries, "ROWS": rows}
            | {"TILE": tile, "QUAD": 4 * tile, "GROUP": 16 * tile, "IS_WIDE": is_wide, "OVERLAPS": True}
            | RULES[rule],
            num_warps,
            2,
            STRIDES,
            tolerated_bytes=16 if rule == "both" else 0,  # 8 of 32 queries of heads of 256 dimensions
        )
        for head_dim, queries, tile, is_wide, rows, num_warps, rule in (
            (64, 16, 128, False, 32, 4, "full"),
            (64, 16, 128, False, 64, 4, "full"),
            (128, 16, 128, False, 32, 4, "full"),
            (128, 16, 128, False, 64, 4, "full"),
            (128, 32, 128, True, 64, 8, "full"),
            (256, 16, 64, False, 64, 8, "full"),
            (256, 32, 64, True, 64, 8, "full"),
            (128, 16, 128, False, 64, 4, "window"),
            (128, 32, 128, True, 64, 8, "both"),
            (256, 16, 64, False, 64, 8, "window"),
            (256, 32, 64, True, 64, 8, "both"),
        )
    ),
    *(
        Case(
            "_split_kv_combine",
            "_combine_kernel",
            ATTENTION,
            PIECES
            | {"HEADS": 32, "HEAD_DIM": head_dim, "TILE": tile, "QUAD": 4 * tile, "GROUP": 16 * tile}
            | {"GROUPS": 4, "ROWS": rows, "OVERLAPS": True}
            | RULES[rule],
            num_warps,
            divisible=STRIDES,
        )
        for head_dim, tile, rows, num_warps, rule in (
            (64, 128, 32, 1, "full"),
            (64, 128, 64, 1, "full"),
            (128, 128, 32, 2, "full"),
            (128, 128, 64, 2, "full"),
            (256, 64, 64, 4, "full"),
            (128, 128, 64, 2, "window"),
            (256, 64, 64, 4, "window"),
        )
    ),
    *(
        Case(
            "prefill_attention",
            "_prefill_kernel",
            ATTENTION,
            {"GQA_GROUP_SIZE": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "QUERIES": queries, "TILE": tile}
            | {"QUAD": 4 * tile, "GROUP": 16 * tile, "HAS_ENDS": True}
            | RULES[rule],
            8,
            2,
            STRIDES,
            tolerated_bytes=1024,
        )
        for head_dim, queries, tile, rule in (
            (64, 64, 128, "full"),
            (128, 64, 128, "full"),
            (256, 16, 64, "full"),
            (128, 64, 128, "window"),
            (256, 16, 64, "both"),
        )
    ),
    *(
        Case(
            "_hopper_attention_kernel",
            "_streamed_attention_kernel",
            ATTENTION
            | pointers("first length")
            | pointers("stored", "*fp32")
            | {"k_desc": descriptor("bf16", 1, 16, 1, 64), "v_desc": descriptor("bf16", 1, 16, 1, 64)},
            {
                "HEADS": 8,
                "GQA_GROUP_SIZE": 4,
                "PACKED": 4,
                "HEAD_DIM": head_dim,
                "BLOCK_SIZE": 16,
                "CHUNKS": chunks,
            }
            | {
                "QUERIES": 32,
                "TILE": 64 if head_dim > 128 else 128,
                "QUAD": 4,
                "GROUP": 16,
                "PIECE": 64,
                "STAGES": 2,
                "REGISTERS": (240, 24),
            }
            | RULES[rule],
            divisible=(*STRIDES, "query_token_stride", "out_token_stride"),
            # Where a quad ends; with more registers left free it is slower. With wide heads in the loop, too.
            tolerated_bytes=4608 if head_dim > 128 else 512,
            **HOPPER,
        )
        for head_dim, chunks, rule in (
            (64, 64, "full"),
            (128, 64, "full"),
            (128, 0, "full"),
            (128, 64, "window"),
            (128, 0, "both"),
            (256, 64, "full"),
            (256, 0, "both"),
        )
    ),
    *(
        Case(
            "varlen_attention",
            "_varlen_kernel",
            ATTENTION | pointers("first length"),
            {"GQA_GROUP_SIZE": packed, "PACKED": packed, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "CHUNKS": 64}
            | {"QUERIES": rows // packed, "TILE": tile, "QUAD": 4 * tile, "GROUP": 16 * tile}
            | RULES[rule],
            8,
            2,
            (*STRIDES, "query_token_stride", "out_token_stride"),
            tolerated_bytes=1024,
        )
        for packed, head_dim, rows, tile, rule in (
            (4, 64, 64, 128, "full"),
            *((packed, 128, 64, 128, "full") for packed in (1, 4, 8)),
            (4, 256, 16, 64, "full"),
            (4, 128, 64, 128, "window"),
            (4, 256, 16, 64, "both"),
        )
    ),
    *(
        Case(
            "skinny_linear",
            "_linear_kernel",
            LINEAR,
            {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "SPLIT": split}
            | {"HAS_BIAS": True, "HAS_RESIDUAL": split > 1, "SQUARES": squares, "EPSILON": 1e-6}
            | STREAMED,
            4,
            num_stages,
            STRIDES,
        )
        for rows, outputs, inputs, split, num_stages, squares in (
            (16, 64, 128, 2, 5, 0),
            (64, 64, 64, 2, 8, 0),
            (64, 64, 64, 1, 8, 0),
            (64, 128, 64, 1, 4, 0),
            (16, 64, 128, 2, 5, 32),
            (32, 128, 64, 1, 4, 32),
        )
    ),
    *(
        Case(
            "gated_linear",
            "_gated_kernel",
            LINEAR,
            {
                "ROWS": rows,
                "OUTPUTS": outputs,
                "INPUTS": inputs,
                "SPLIT": 1,
                "SQUARES": squares,
                "EPSILON": 1e-5,
                "HAS_BIAS": rows == 32,
                "ACTIVATION": activation,
            }
            | STREAMED,
            4,
            num_stages,
            STRIDES,
        )
        for rows in (16, 32, 64)
        for outputs, inputs, squares, num_stages in ((128, 64, 64, 4), (64, 128, 0, 5))
        for activation in ACTIVATIONS
    ),
    *(
        streamed_linear(kind, rows, inputs, stages, split, under_way, IS_SCALED=False, HAS_RESIDUAL=True)
        for kind, rows, inputs, stages, split, under_way in (
            ("bf16", 8, 256, 6, 1, 0),
            ("bf16", 8, 256, 6, 4, 0),
            ("bf16", 16, 256, 5, 1, 1),
            ("bf16", 16, 256, 5, 2, 0),
            ("bf16", 32, 256, 4, 2, 0),
            ("fp16", 64, 256, 3, 1, 1),
            ("bf16", 64, 128, 7, 1, 1),
            ("bf16", 64, 128, 7, 2, 1),
            ("bf16", 64, 128, 7, 4, 1),
        )
    ),
    *(
        case
        for kind, rows, inputs, stages, under_way in (
            ("bf16", 8, 256, 6, 0),
            ("bf16", 16, 256, 5, 0),
            ("bf16", 16, 256, 5, 1),
            ("bf16", 32, 256, 4, 1),
            ("fp16", 64, 256, 3, 1),
            ("bf16", 64, 128, 7, 1),
        )
        for case in (
            Case(
                "_hopper_gated_linear",
                "_streamed_gated_kernel",
                linear(kind)
                | {
                    "x_desc": descriptor(kind, 2, rows // 2, inputs),
                    "weight_desc": descriptor(kind, 1, 4, 2, 8, inputs),
                },
                streamed_by_copies(kind, inputs, rows, under_way=under_way)
                | {"STAGES": stages, "TILES": 1, "PAIRED": 8, "HAS_BIAS": rows == 32}
                | {"ACTIVATION": ACTIVATIONS[rows == 16]},
                divisible=STREAMED_BY_COPIES,
                **HOPPER,
            ),
            *(
                Case(
                    "qkv_rope_append",
                    "_streamed_qkv_kernel",
                    linear(kind)
                    | {"x_desc": descriptor(kind, 2, rows // 2, inputs)}
                    | {"weight_desc": descriptor(kind, 1, 4, 2, 8, inputs)},
                    streamed_by_copies(kind, inputs, rows, under_way=under_way)
                    | {"STAGES": stages, "PAIRED": 8, "HEAD_DIM": head_dim, "HAS_BIAS": has_bias},
                    **HOPPER,
                )
                for head_dim, has_bias in ((64, True), (128, True), (256, True), (128, False))
            ),
        )
    ),
    *(
        streamed_linear("fp8e4nv", rows, inputs, stages, split, under_way, IS_SCALED=True, HAS_RESIDUAL=False)
        for rows, inputs, stages, split, under_way in (
            (8, 512, 6, 2, 0),
            (16, 512, 5, 1, 1),
            (32, 512, 4, 2, 0),
            (64, 512, 3, 1, 1),
            (64, 256, 7, 2, 1),
        )
    ),
    # Of an odd number of outputs, which cannot be written by many at once.
    streamed_linear("bf16", 64, 128, 7, 1, IS_SCALED=False, HAS_RESIDUAL=True)._replace(divisible=STRIDES),
    *(
        streamed_linear(kind, rows, inputs, stages, 1, 0, outputs=outputs, IS_SCALED=False, HAS_RESIDUAL=True)
        for kind, rows, inputs, stages, outputs in (
            ("bf16", 8, 256, 11, 32),
            ("bf16", 16, 256, 9, 32),
            ("fp16", 32, 256, 7, 32),
        )
    ),
    *(
        Case(
            "_hopper_gated_linear",
            "_streamed_gated_kernel",
            linear(kind)
            | {
                "x_desc": descriptor(kind, 2, rows // 2, 128),
                "weight_desc": descriptor(kind, 1, 4, 2, 8, 128),
            },
            streamed_by_copies(kind, 128, rows, under_way=int(rows == 64))
            | {"STAGES": stages, "TILES": tiles, "PAIRED": 8, "HAS_BIAS": has_bias}
            | {"ACTIVATION": activation},
            divisible=STREAMED_BY_COPIES,
            **HOPPER,
        )
        for kind, rows, tiles, stages, has_bias in (
            ("bf16", 128, 2, 3, False),
            ("bf16", 128, 3, 2, False),
            ("fp16", 128, 3, 2, False),
            ("bf16", 128, 3, 2, True),
        )
        for activation in ACTIVATIONS
    ),
    *(
        Case(
            "_hopper_gated_gemm",
            "_dense_gated_kernel",
            {
                "x_desc": descriptor(kind, 128, 64),
                "weight_desc": descriptor(kind, 16, 2, 8, 64),
                "out_desc": descriptor(kind, 128, 128),
            },
            {"ROWS": 128, "OUTPUTS": 256, "INPUTS": 64, "PAIRED": 8, "GROUP": 8, "STAGES": 4}
            | {"ACTIVATION": activation},
            8,
            **HOPPER,
        )
        for kind in ("bf16", "fp16")
        for activation in ACTIVATIONS
    ),
    *(
        case
        for rows in (16, 32)
        for split, tiles in ((1, 32), (2, 64))
        for case in (
            Case(
                "add_linear",
                "_add_kernel",
                LINEAR,
                {"ROWS": rows, "OUTPUTS": 64, "INPUTS": 128, "SPLIT": split, "TILES": tiles}
                | {"HAS_BIAS": rows == 32, "UNIT_OFFSET": rows == 32}
                | STREAMED,
                4,
                5,
                STRIDES,
            ),
            Case(
                "qkv_rope_append",
                "_qkv_kernel",
                LINEAR,
                {"ROWS": rows, "OUTPUTS": 64, "INPUTS": 128, "SPLIT": split, "TILES": tiles, "EPSILON": 1e-5}
                | {"HEAD_DIM": 64 * split, "HAS_BIAS": rows == 16}
                | STREAMED,
                4,
                5,
                STRIDES,
            ),
        )
    ),
    *(
        Case(
            "batch_invariant_linear",
            "_batch_invariant_kernel",
            pointers("x weight bias out", kind),
            {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "IS_WHOLE": is_whole}
            | {"HAS_BIAS": True, "OVERLAPS": True},
            num_warps,
            num_stages,
            STRIDES if is_whole else (),
        )
        for kind, rows, outputs, inputs, is_whole, num_warps, num_stages in (
            ("*bf16", 256, 128, 64, True, 8, 4),
            ("*bf16", 128, 64, 64, True, 4, 4),
            ("*bf16", 64, 128, 64, True, 4, 5),
            ("*bf16", 16, 64, 64, False, 4, 5),
            ("*fp32", 32, 64, 32, False, 4, 3),
        )
    ),
    rms_norm("*bf16", "*fp8e4nv", 4096, HAS_STEP=True)._replace(least_capability=89),
    Case(
        "quantized_linear",
        "_round_kernel",
        pointers("x", "*bf16") | pointers("rounded", "*fp8e4nv") | pointers("step", "*fp32"),
        {"BLOCK": 4096, "OVERLAPS": True},
        8,
        divisible=STRIDES,
        least_capability=89,
    ),
    Case(
        "quantized_linear",
        "_quantized_kernel",
        pointers("out", "*bf16") | pointers("rounded weight", "*fp8e4nv") | pointers("step scale", "*fp32"),
        {"ROWS": 16, "OUTPUTS": 128, "INPUTS": 128, "OVERLAPS": True},
        4,
        6,
        STRIDES,
        least_capability=89,
    ),
    Case(
        "screened_linear",
        "_round_kernel",
        pointers("x", "*bf16") | pointers("rounded", "*i8") | pointers("step error spread", "*fp32"),
        {"LARGEST": 127.0, "BLOCK": 4096, "OVERLAPS": True},
        8,
        divisible=STRIDES,
    ),
    *(
        Case(
            "screened_linear",
            "_screen_kernel",
            pointers("rounded packed", "*i8")
            | pointers("out", "*bf16")
            | pointers("step error scale output_error most least", "*fp32"),
            {"ROWS": rows, "OUTPUTS": 128, "NIBBLES": 128, "IS_ASSEMBLED": True, "OVERLAPS": True},
            8,
            divisible=STRIDES,
        )
        for rows in (16, 32)
    ),
    *(
        Case(
            "screened_linear",
            "_rescore_kernel",
            pointers("x weight out", "*bf16") | pointers("error output_error most least", "*fp32"),
            {"TILES": 2048, "SHARE": 16, "OUTPUTS": 128, "LOOKED_AT": 8, "ROUNDING": 2**-8}
            | {"BLOCK": 4096 * num_warps, "OVERLAPS": True},
            num_warps,
            divisible=STRIDES,
        )
        for num_warps in (1, 2)
    ),
    *(
        case
        for depth in (0, 3)
        for case in (
            Case(
                "rewind",
                "_rewind_kernel",
                pointers("accepted prefill offset length count last_id table release")
                | {"remove_ptr": "*i1"},
                BOOKKEEPING | {"DEPTH": depth, "ACTIVE_IS_POINTER": False},
            ),
            Case(
                "rewind",
                "_rewind_kernel",
                pointers("accepted prefill offset length count last_id table release", "*i32")
                | {"remove_ptr": "*i1", "active": "*i32"},
                BOOKKEEPING | {"DEPTH": depth, "ACTIVE_IS_POINTER": True},
            ),
            Case(
                "prepare_verify_inputs",
                "_open_kernel",
                pointers("last_token length limit cap offset count last_id table granted prefill draft")
                | pointers("token position slot start end next")
                | {"valid_ptr": "*i1"},
                {"BLOCK_SIZE": 16, "ROWS": 32, "DEPTH": depth, "OVERLAPS": True},
                num_warps=1,
            ),
            Case(
                "open_drafts",
                "_open_drafts_kernel",
                pointers("length limit granted given given_count token position slot start end")
                | pointers("last_place next_position"),
                {"BLOCK_SIZE": 16, "ROWS": 32, "AHEAD": 0, "WIDTH": depth + 1}
                | {"HAS_COUNTS": True, "OVERLAPS": True},
                num_warps=1,
            ),
            Case(
                "verify_and_rewind",
                "_commit_kernel",
                pointers("token picked prefill last_token length offset count last_id table pending")
                | pointers("pending_count emitted")
                | {"valid_ptr": "*i1", "broken_ptr": "*i1"},
                {"BLOCK_SIZE": 16, "ROWS": 32, "DEPTH": depth, "HAS_BROKEN": True, "OVERLAPS": True},
                num_warps=1,
            ),
            Case(
                "force_acceptance",
                "_force_kernel",
                pointers("picked token seed start threshold") | {"valid_ptr": "*i1"},
                {"ROWS": 32, "DEPTH": depth},
                num_warps=1,
            ),
            Case(
                "relax_acceptance",
                "_relax_kernel",
                pointers("sampled token id span") | pointers("valid probable", "*i1"),
                {"ROWS": 32, "DEPTH": depth},
                num_warps=1,
            ),
            Case(
                "verify",
                "_verify_kernel",
                pointers("input output last") | {"mask_ptr": "*i1"},
                {"DEPTH": depth, "ROWS": 128},
            ),
            Case(
                "prepare",
                "_prepare_kernel",
                pointers("output place last input sampled last_place accepted count") | {"mask_ptr": "*i1"},
                {"DEPTH": depth, "ROWS": 128},
            ),
        )
    ),
    *(
        Case(
            "relax_acceptance",
            "_judge_kernel",
            pointers("token id span")
            | pointers("valid probable", "*i1")
            | {"logits_ptr": kind, "max_gap": "fp32"},
            {"DEPTH": 3, "BLOCK": 4096, "WIDE": wide},
            num_warps=8,
        )
        for kind, wide in (("*bf16", tl.float32), ("*fp32", tl.float32), ("*fp64", tl.float64))
    ),
    *(
        case
        for kind in ("*i32", VECTOR)
        for case in (
            Case(
                "prepare_drafter_inputs",
                "_prepare_inputs_kernel",
                pointers("drafts valid start index rejected", kind),
                {"ROWS": 128},
            ),
            Case(
                "prepare_next_tokens",
                "_next_tokens_kernel",
                pointers("sampled backup token count", kind) | {"discard_ptr": "*i1"},
                {"WIDTH": 4, "ROWS": 128},
            ),
            Case(
                "advance_draft_step",
                "_advance_kernel",
                pointers("position table length new_position slot", kind),
                BOOKKEEPING,
            ),
            Case(
                "expand_drafter_inputs",
                "_expand_kernel",
                pointers("target target_position next start end token position new mapping", kind)
                | pointers("rejected masked", "*i1"),
                {"SHIFT": int(kind == VECTOR), "TOKENS": 256},
                num_warps=2,
            ),
            Case(
                "extend_queries",
                "_extend_kernel",
                pointers("start length new_start new_length", kind),
                {"ROWS": 128},
            ),
        )
    ),
    *(
        case
        for kind, precision, tolerated in (("*bf16", "bf16", 0), ("*fp32", "tf32x3", 2048))
        for case in (
            Case(
                "_delta_pieces",
                "_systems_kernel",
                pointers("mixed gate inverse seen", kind) | pointers("log bias number", "*fp32") | SPANS,
                {"SHARING": 3, "SPANS": 64, "PIECE": 64, "KEYS": 128, "CHUNK": 32, "PRECISION": precision},
                2,
                1,
                divisible=DELTA,
                tolerated_bytes=tolerated,
            ),
            Case(
                "_delta_pieces",
                "_pieces_kernel",
                pointers("mixed inverse seen out", kind) | pointers("number state", "*fp32") | SPANS,
                {
                    "SHARING": 3,
                    "PIECE": 64,
                    "KEYS": 128,
                    "VALUES": 32 if kind == "*bf16" else 16,
                    "PRECISION": precision,
                },
                8,
                2 if kind == "*bf16" else 1,
                divisible=DELTA,
                tolerated_bytes=tolerated,
            ),
        )
    ),
    *(
        Case(
            "mamba",
            "_copy_kernel",
            pointers("intermediate current", kind) | pointers("prefill slot accepted"),
            {"BLOCK": 1024},
        )
        for kind in ("*i8", "*i16", "*i32", "*i64")
    ),
    *(
        Case(
            "gather_ranks",
            "_gather_ranks_kernel",
            pointers("x out", kind) | pointers("addresses counts"),
            {"RANKS": 8, "MAX_PROGRAMS": 64, "BLOCK": 8192 // size},
            8,
            divisible=("x", "out", "row"),
        )
        for kind, size in (("*i8", 1), ("*i32", 4), ("*i64", 8))
    ),
    Case(
        "gather_ranks",
        "_gather_flagged_kernel",
        pointers("x out", "*i32") | pointers("addresses counts"),
        {"RANKS": 8, "PROGRAMS": 128, "WORDS": 1024, "OVERLAPS": True},
        divisible=("x", "out", "row"),
    ),
    *(
        Case(
            "copy_entries",
            "_copy_entries_kernel",
            pointers("memory", kind) | pointers("source target"),
            {"BLOCK": 4096},
            8,
        )
        for kind in ("*i16", "*i32", "*i64")
    ),
    *(
        case
        for kind in ("*bf16", "*fp32")
        for case in (
            Case(
                "process_logits",
                "_adjust_kernel",
                pointers("logits", kind) | pointers("window_token") | PROCESSORS,
                {"TOKENS": 1024},
                divisible=LOGITS,
            ),
            Case(
                "mask_logits",
                "_mask_kernel",
                pointers("logits", kind) | {"line_ptr": VECTOR, "allowed_ptr": "*i32"},
                {"TOKENS": 1024},
                divisible=LOGITS,
            ),
            Case("sample", "_scan_kernel", SAMPLING | {"logits_ptr": kind}, SEARCH, divisible=LOGITS),
            *(
                Case(
                    "sample",
                    "_pick_kernel",
                    SAMPLING | {"logits_ptr": kind},
                    PICK | {"SHIFT": 16 if kind == "*bf16" else 0, "CHUNKS": chunks},
                    8,
                    divisible=LOGITS,
                    tolerated_bytes=0 if chunks == 128 else 128,  # vocabularies of less than 131,072 tokens
                )
                for chunks in (2, 32, 128)
            ),
            *(
                rms_norm(
                    kind,
                    kind,
                    block,
                    SCALE=scale,
                    HAS_RESIDUAL=has_residual,
                    HAS_IDS=not has_residual,
                    UNIT_OFFSET=unit_offset,
                )._replace(tolerated_bytes=32 if scale != 1 else 0)  # of one launch a step
                for has_residual, unit_offset, block, scale in (
                    (False, False, 1024, 1.0),
                    (False, True, 4096, 55.5),
                    (True, True, 8192, 1.0),
                )
            ),
            *(
                Case(
                    "rope_append",
                    "_rope_append_kernel",
                    pointers("query key value key_cache value_cache query_norm key_norm", kind)
                    | {"position_ptr": "*i64", "slot_ptr": "*i64", "table_ptr": "*fp32"},
                    {
                        "EPSILON": 1e-6,
                        "HAS_NORMS": has_norms,
                        "UNIT_OFFSET": unit_offset,
                        "HEADS": 32,
                        "HALF": half,
                        "REST": rest,
                        "OVERLAPS": True,
                    },
                    num_warps=8 if kind == "*fp32" else 4,
                )
                for has_norms, unit_offset, half, rest in (
                    (False, False, 64, 0),
                    (True, False, 64, 0),
                    (True, True, 32, 64),
                )
            ),
            *(
                Case(
                    "store_pending_states",
                    "_keep_kernel",
                    pointers("state pending block_hidden", kind) | pointers("prefill state_id slot count"),
                    {
                        "BLOCK_SIZE": 16,
                        "APPENDS": appends,
                        "BLOCK": block,
                        "OVERLAPS": True,
                    },
                    num_warps=warps_of(block),
                )
                for appends, block in ((False, 1024), (True, 8192), (False, 8192))
            ),
            *(
                Case(
                    "gated_mul",
                    "_gated_mul_kernel",
                    pointers("gate_up out", kind),
                    {"BLOCK": block, "ACTIVATION": activation, "OVERLAPS": True},
                    num_warps,
                )
                for block, num_warps in ((1024, 4), (2048, 8))
                for activation in ACTIVATIONS
            ),
            Case(
                "sigmoid_mul",
                "_sigmoid_mul_kernel",
                pointers("x gate", kind),
                {"BLOCK": 256, "OVERLAPS": True},
            ),
            Case(
                "gated_rms_norm",
                "_gated_rms_norm_kernel",
                pointers("x gate weight out", kind),
                {"EPSILON": 1e-6, "HEADS": 8, "BLOCK": 128, "OVERLAPS": True},
            ),
            Case(
                "causal_convolution",
                "_windows_kernel",
                pointers("x weight state window out", kind) | pointers("id"),
                {"TAPS": 4, "BLOCK": 512, "OVERLAPS": True},
            ),
            Case(
                "causal_convolution",
                "_chunks_kernel",
                pointers("x weight state out", kind) | SPANS,
                {"TAPS": 4, "SPANS": 64, "TOKENS": 8, "BLOCK": 128, "OVERLAPS": True},
            ),
            Case(
                "causal_convolution",
                "_last_inputs_kernel",
                pointers("x state", kind) | SPANS,
                {"TAPS": 4, "BLOCK": 512},
            ),
            Case(
                "delta_windows",
                "_keep_kernel",
                pointers("mixed gate kept_mixed kept_gate", kind) | pointers("id"),
                {"BLOCK": 1024, "OVERLAPS": True},
            ),
            *(
                Case(
                    "_delta_steps",
                    "_steps_kernel",
                    pointers("mixed gate kept_mixed kept_gate out", kind)
                    | pointers("log bias state", "*fp32")
                    | SPANS
                    | pointers("count"),
                    {"SHARING": 3, "IS_SPAN": is_span, "KEYS": 128, "VALUES": 32, "OVERLAPS": True},
                    divisible=DELTA,
                    tolerated_bytes=16,  # of sm_80, which has no room for the windows' order of sums
                )
                for is_span in (False, True)
            ),
        )
    ),
    Case(
        "process_logits",
        "_mask_kernel",
        pointers("window_token position stop_token min_position bad_word recent_token")
        | pointers("forced_position forced_token forced_after")
        | PROCESSORS,
        {"STOPS": 64, "WORDS": 256, "LENGTH": 16}
        | {"STOPS_BLOCK": 64, "WORDS_BLOCK": 256, "LENGTH_BLOCK": 16, "TOKENS": 1024},
        divisible=LOGITS,
    ),
    Case("sample", "_noise_kernel", pointers("seed position") | {"noise_ptr": "*fp32"}, {"GROUPS": 512}),
    Case("stamp", "_stamp_kernel", {"out_ptr": VECTOR, "number": "i32"}, {"MOST": 2, "OVERLAPS": True}, 1),
    Case(
        "copy_results_to_host",
        "_deliver_kernel",
        {"packed_ptr": VECTOR, "places_ptr": VECTOR, "count_ptr": VECTOR},
        {"TIME_INDEX": 3, "HAS_CLOCK": True, "BLOCK": 2048, "OVERLAPS": True},
        num_warps=8,
    ),
    Case(
        "begin_decode",
        "_start_kernel",
        pointers("index token new_length last_token length offset count last_id pending_count")
        | pointers("table granted pending"),
        {"BLOCK_SIZE": 16, "BLOCKS": 1024},
    ),
    *(
        Case(
            "propose_ngram",
            "_propose_kernel",
            pointers("last_token length limit table draft state_id num_predicted start")
            | {"cache_ptr": "*i32", "predicted_ptr": "*i32"},
            {"DEPTH": depth, "DRAFTS": drafts, "MAX_NGRAM": 4, "PREDICTED_NGRAM": 16, "PLACES": 1 << 24}
            | {"BLOCK_SIZE": 16, "TOKENS": 4096, "OVERLAPS": True},
            num_warps=8,
        )
        for depth, drafts in ((3, 4), (8, 8))
    ),
    Case(
        "store_tokens",
        "_store_tokens_kernel",
        pointers("token slot") | {"cache_ptr": "*i32"},
        {"TOKENS": 256, "OVERLAPS": True},
        num_warps=2,
    ),
    Case(
        "stream_read",
        "_stream_read_kernel",
        pointers("data out", "*i32"),
        {"BLOCK": 4096},
        8,
        divisible=("size",),
    ),
]


def compiled(case: Case, capability: int, **changes: Any) -> tuple[Any, str]:
    """(the kernel, what the assembler says of it). changes: of the options that its launcher gives."""
    module = importlib.import_module(MODULES[case.op])
    kernel = getattr(module, case.kernel)
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            # Launches that overlap came with sm_90.
            is_too_old = name in ("OVERLAPS", "FETCHES_AHEAD") and capability < 90
            constants[(place,)] = False if is_too_old else case.constants[name]
            continue
        signature[name] = case.types.get(name, "i32")
        if signature[name].startswith("*") or name in case.divisible:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    own_options = f"{case.kernel.removesuffix('_kernel').upper()}_OPTIONS"
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    options |= getattr(module, own_options, getattr(module, "_OPTIONS", {})) | changes
    report = StringIO()
    with redirect_stdout(report):
        binary = triton.compile(source, target=target, options=options)
    return binary, report.getvalue()


def may_be_fused(binary: Any) -> bool:
    """Whether a product or a sum stands there whose rounding the assembler may leave out."""
    return re.search(r"\b(mul|add|sub)\.f32\b", binary.asm["ptx"]) is not None


def looks_up_late(binary: Any) -> bool:
    """Whether anything of what is read past the first cache, because it is older than the kernel in front, is
    asked for only when that has ended: the assembler may move the wait for it."""
    _early, wait, late = binary.asm["sass"].partition("ACQBULK")
    return not wait or "LDG.E.STRONG.GPU" in late


def differs_by_thread(binary: Any) -> bool:
    """Whether a thread fuses a product of its own, or lets the assembler fuse it, with what it adds from
    another: that one does it the other way round, and rounds otherwise."""
    ptx = binary.asm["ptx"]
    shuffled = dict(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+),", ptx))
    fused = re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx)
    products = set(re.findall(r"mul\.f32\s+(%\w+),", ptx)) if binary.metadata.enable_fp_fusion else set()
    added = [name for pair in re.findall(r"add\.f32\s+%\w+, (%\w+), (%\w+);", ptx) for name in pair]
    return not shuffled.keys().isdisjoint(fused) or any(shuffled.get(name) in products for name in added)


@triton.jit
def _sum_kernel(x_ptr, y_ptr, out_ptr):
    place = tl.arange(0, 32)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + place) * tl.load(y_ptr + place), 0))


def control(capability: int, *, enable_fp_fusion: bool) -> Any:
    """A kernel whose threads sum up products of one another."""
    signature = dict.fromkeys(_sum_kernel.arg_names, "*fp32")
    options = {"num_warps": 1, "enable_fp_fusion": enable_fp_fusion}
    source = ASTSource(fn=_sum_kernel, signature=signature, constexprs={}, attrs={})
    with redirect_stdout(StringIO()):
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def registers_and_spills(report: str) -> tuple[int, int]:
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.findall(r"(\d+) bytes spill", report)
    assert registers is not None, report
    assert spilled, report
    return int(registers[1]), sum(int(size) for size in spilled)


def plain_report(binary: Any, capability: int) -> str:
    """What the assembler says without Triton's options."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(binary.asm["ptx"])
        command = [get_ptxas(capability).path, "-v", f"--gpu-name=sm_{capability}a", str(source)]
        return subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        ).stderr


def orders_of_sums(binary: Any) -> set[str]:
    """Which threads hold what a kernel sums up, in all its sums: the layouts of their operands, spelled
    out."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", binary.asm["ttgir"], re.MULTILINE))
    operands = re.findall(r"\}\) : \((tensor<[^>]*>)", binary.asm["ttgir"])
    assert operands, "the kernel sums something up"
    return {re.sub(r"#\w+", lambda name: layouts[name[0]], operand) for operand in operands}


def firsts(cases: list[Case]) -> list[Case]:
    """Of each kernel its first case, and of those that share one order of sums, or that have sliding windows,
    the first of each form."""
    forms = {
        (case.op, case.kernel, case.constants.get("IS_SPAN"), "sliding_window" in case.constants): case
        for case in reversed(cases)
    }
    return list(forms.values())


def main(capability: int, ops: list[str], *, each_once: bool) -> int:
    failures = 0
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # of what is in the cache the assembler says nothing
    # A sum as the pick of a small vocabulary has them: what is looked for below is seen.
    assert differs_by_thread(control(capability, enable_fp_fusion=True))
    assert not differs_by_thread(control(capability, enable_fp_fusion=False))
    cases = [
        case
        for case in CASES
        if case.least_capability <= capability <= case.most_capability and case.op in (ops or [case.op])
    ]
    cases = firsts(cases) if each_once else cases
    orders: dict[str, set[str]] = {}
    assert cases, f"no kernel of {', '.join(ops)} is for {capability}"
    for case in cases:
        binary, report = compiled(case, capability)
        registers, spilled = registers_and_spills(report)
        spilled_anyway = spilled
        if capability >= 100 and 0 < spilled <= TOLERATED_BYTES:
            _, spilled_anyway = registers_and_spills(plain_report(binary, capability))
        failures += spilled_anyway > case.tolerated_bytes
        if case.op.startswith("_split_kv") and may_be_fused(binary):
            print(f"{case.op} {case.kernel}: rounding is left to the compiler")
            failures += 1
        if case.kernel == "_partial_kernel" and capability >= 90 and looks_up_late(binary):
            print(f"{case.op} {case.kernel}: first blocks are looked up after the wait")
            failures += 1
        if (
            case.op == "_delta_steps"
            and orders.setdefault(str(case.types), found := orders_of_sums(binary)) != found
        ):
            print(f"{case.op} {case.kernel}: chunks sum up in another order than windows")
            failures += 1
        if differs_by_thread(binary):
            print(f"{case.op} {case.kernel}: threads of a warp may disagree about a sum")
            failures += 1
        kinds = "/".join(sorted({kind.partition(",NVMMA")[0] for kind in case.types.values()}))
        print(f"{case.op} {case.kernel} {kinds} {case.constants}: {registers} registers, {spilled} B spilled")
    print(
        f"sm_{capability}: {len(cases)} cases, {failures} that spill registers, wait or round as they must not"
    )
    return min(failures, 1)


if __name__ == "__main__":
    operations = [argument for argument in sys.argv[2:] if argument != "--each-once"]
    sys.exit(main(int(sys.argv[1]), operations, each_once="--each-once" in sys.argv))
