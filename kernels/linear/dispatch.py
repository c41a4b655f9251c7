"""Chooses the kernel of a linear layer from sizes and traits of the device: a pure function, with a row for each kernel.

The thresholds were measured on an H200. Knows no tensors; `choice_of` in _hopper_core.py reads shape and traits of them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

# With more than FEW_ROWS rows the library is as fast as the skinny kernel, but for sums more than twice as long as the
# result is wide. No kernel for few rows takes more than MAX_ROWS, but that of gates.
FEW_ROWS, MAX_ROWS = 32, 64
MIN_INPUTS_MULTIPLE = 64
# Launches cost time where products are short. A round of a model 1,024 wide takes an H200 0.80 ms in nine launches a layer
# and 0.71 in six at batch 1, 0.94 and 0.74 at batch 8; 4,096 wide 4.14 and 4.21 at batch 4. No number of rows may decide:
# a row's result is the same beside any of up to FEW_ROWS.
MAX_HIDDEN_OF_FEW_LAUNCHES = 2048
# A TMA kernel computes a tile of OUTPUTS outputs, and a copy has these bytes of each. Where the tile of rows is the largest
# and all programs run at once, small copies leave less to do after the last.
OUTPUTS, COPY_BYTES, SMALL_COPY_BYTES = 64, 512, 256
# A part of fewer copies takes longer to reduce than to compute; fewer programs issue too few loads at once.
_MIN_COPIES, _MIN_SHARE_OF_PROGRAMS = 8, 0.7
# The last part of a split sum has this number of large copies more than the others, whose sums it waits for.
_MORE_OF_LAST, _MAX_SPLIT = 4.5, 4
# Gates of up to MANY_ROWS rows: a program computes several tiles, so that no program starts after another.
MANY_ROWS, _MANY_TILES, _MIN_SHARE_OF_MANY = 128, (2, 3), 0.75
# Outputs of a gate and of `up` alternate by eight.
PAIRED = 8
# The persistent kernel of gates: tiles, and where it is faster than the library.
GATED_ROWS, GATED_OUTPUTS, GATED_INPUTS = 128, 256, 64
MIN_GATED_ROWS, _MIN_GATED_INPUTS, _MIN_SHARE_OF_WAVES = 640, 1024, 0.94
HALF_TYPES = torch.bfloat16, torch.float16
TMA_TYPES = *HALF_TYPES, torch.float8_e4m3fn


class KernelTraits(NamedTuple):
    """What a kernel promises of its results."""

    order_of_sums: str
    rounding: str


class LinearKernel(Enum):
    """A row for each kernel that computes linear layers."""

    TMA = KernelTraits(
        "In MMA instructions of 16 inputs (32 of float8) from the tile's first input on, wrapping around within a part of "
        "the sum; parts are added by ascending index. The weight's shape decides, for up to 64 rows; gates of 65 to 128 rows "
        "begin at other inputs.",
        "float32 accumulation (float8: as the tensor core accumulates); scale, bias and residual in float32; one rounding",
    )
    SKINNY = KernelTraits(
        "By ascending input within a part of the sum; parts are added by ascending index. The weight's shape decides, for up "
        "to 32 rows, and up to 64 where sums are longer than twice the number of outputs.",
        "float32 accumulation; deferred norm, bias, activation and residual in float32; one rounding, which q, k and v get "
        "before the rotation, too",
    )
    PERSISTENT_GATED = KernelTraits(
        "By ascending input in MMA instructions of 16 inputs, whatever the number of rows.",
        "float32 accumulation; activation in float32; one rounding",
    )
    LIBRARY = KernelTraits(
        "The library's, which may depend on the number of rows.",
        "The library's product is rounded once; an activation rounds again",
    )


class FusedOperation(Enum):
    """What a launch computes besides the product, as far as it decides about the kernel."""

    ADD = "optional bias, scale and residual"
    ADD_DEFERRED = "optional bias and residual of a product with a deferred norm"
    ADD_NORM = "residual, and the deferred norm of what follows"
    SILU_MUL = "gated activation"
    SILU_MUL_DEFERRED = "gated activation of a product with a deferred norm"
    QKV = "rotary embedding and KV cache"
    QKV_DEFERRED = "rotary embedding and KV cache of a product with a deferred norm"


class LinearShape(NamedTuple):
    """Sizes of a product and the layout of its operands."""

    rows: int
    outputs: int  # rows of the weight
    inputs: int
    dtype: torch.dtype  # of both operands
    is_dense: bool = True  # the weight has no gaps, and neither have the inputs of a row
    is_bulk: bool = True  # and TMA can copy both operands
    is_bulk_out: bool = True  # and can write the result


class DeviceTraits(NamedTuple):
    """What matters of a device."""

    multiprocessors: int
    has_tma: bool  # Hopper with Gluon
    has_triton: bool = True
    is_interpreted: bool = False  # Triton's interpreter, which computes in float32


class TmaGemmConfig(NamedTuple):
    """The grid and the pipeline of a TMA kernel. Of up to MAX_ROWS rows their number changes how large copies are, but not the
    order of sums, so that a row's result is the same for any number of rows: parts begin at the same inputs, and so do tiles.
    Of 4096 inputs of 16 bits tile 3 begins with large copy 12 of 16, or with small copy 24 of 32: with input 3072."""

    programs: int
    split: int = 1  # parts of a sum
    part_copies: int = 0  # of each part but the last
    tiles: int = 1  # of a program
    copy_bytes: int = COPY_BYTES  # of an output


class LinearChoice(NamedTuple):
    kernel: LinearKernel
    config: TmaGemmConfig | None = None


def choose(shape: LinearShape, device: DeviceTraits, operation: FusedOperation) -> LinearChoice:
    """Returns the kernel for a launch, and the configuration of a TMA kernel."""
    config = _tma_config(shape, device, operation)
    if config is not None:
        return LinearChoice(LinearKernel.TMA, config)
    if is_skinny(shape, device):
        return LinearChoice(LinearKernel.SKINNY)
    if operation is FusedOperation.SILU_MUL and _is_persistent(shape, device):
        return LinearChoice(LinearKernel.PERSISTENT_GATED)
    return LinearChoice(LinearKernel.LIBRARY)


def is_short_stream(rows: int, hidden: int, dtype: torch.dtype) -> bool:
    """Returns whether products around a residual stream of these sizes compute what precedes and follows them, where they
    can. In float16 the stream could overflow when a deferred norm's weight multiplies it before the norm divides it."""
    has_width = hidden <= MAX_HIDDEN_OF_FEW_LAUNCHES and hidden % MIN_INPUTS_MULTIPLE == 0
    return 0 < rows <= FEW_ROWS and has_width and dtype == torch.bfloat16


def is_skinny(shape: LinearShape, device: DeviceTraits) -> bool:
    """Returns whether the skinny kernel computes such a product, where none is preferred to it."""
    has_type = shape.dtype == torch.float32 if device.is_interpreted else shape.dtype in HALF_TYPES
    most_rows = MAX_ROWS if shape.inputs > 2 * shape.outputs else FEW_ROWS
    has_shape = 0 < shape.rows <= most_rows and shape.inputs % MIN_INPUTS_MULTIPLE == 0
    return device.has_triton and has_type and has_shape and shape.is_dense


def _tma_config(shape: LinearShape, device: DeviceTraits, operation: FusedOperation) -> TmaGemmConfig | None:
    if operation is FusedOperation.ADD:
        return tma_config(shape, device, is_paired=False)
    if operation is FusedOperation.QKV:
        return tma_config(shape, device, is_paired=True)
    if operation is FusedOperation.SILU_MUL:
        return tma_config(shape, device, is_paired=True) or tma_config_of_many(shape, device)
    return None


def tma_config(shape: LinearShape, device: DeviceTraits, *, is_paired: bool) -> TmaGemmConfig | None:
    """For up to MAX_ROWS rows; None: the kernel is not for them. is_paired: of outputs that belong together by two (a gate and
    its `up`, the halves of a head), whose sums are never split."""
    if not _can_use_tma(shape, device, is_paired=is_paired) or shape.rows > MAX_ROWS:
        return None
    copies = shape.inputs * shape.dtype.itemsize // COPY_BYTES
    tiles = _blocks(shape.outputs, OUTPUTS)
    most = min(device.multiprocessors // tiles, copies // _MIN_COPIES, _MAX_SPLIT) if not is_paired else 1
    split = 1 << (most.bit_length() - 1) if most > 1 else 1
    programs = tiles * split
    if programs < _MIN_SHARE_OF_PROGRAMS * device.multiprocessors:
        return None
    is_small = shape.rows > MAX_ROWS // 2 and programs <= device.multiprocessors
    copy_bytes = SMALL_COPY_BYTES if is_small else COPY_BYTES
    part_copies = round((copies - _MORE_OF_LAST) / split) * (COPY_BYTES // copy_bytes) if split > 1 else 0
    return TmaGemmConfig(programs, split, part_copies, copy_bytes=copy_bytes)


def tma_config_of_many(shape: LinearShape, device: DeviceTraits) -> TmaGemmConfig | None:
    """For gates of more rows than MAX_ROWS, up to MANY_ROWS; None: the kernel is not for them."""
    if not _can_use_tma(shape, device, is_paired=True) or not MAX_ROWS < shape.rows <= MANY_ROWS:
        return None
    all_tiles = _blocks(shape.outputs, OUTPUTS)
    tiles = _blocks(all_tiles, device.multiprocessors)
    programs = _blocks(all_tiles, tiles)
    is_enough = tiles in _MANY_TILES and programs >= _MIN_SHARE_OF_MANY * device.multiprocessors
    return TmaGemmConfig(programs, tiles=tiles, copy_bytes=SMALL_COPY_BYTES) if is_enough else None


def is_persistent_shape(rows: int, outputs: int, inputs: int, dtype: torch.dtype, programs: int) -> bool:
    """Returns whether the waves of the persistent kernel of gates fill that number of multiprocessors well enough."""
    has_shape = rows >= MIN_GATED_ROWS and inputs >= _MIN_GATED_INPUTS and inputs % GATED_INPUTS == 0
    if dtype not in HALF_TYPES or not has_shape or outputs % (2 * PAIRED) > 0:
        return False
    all_tiles = _blocks(rows, GATED_ROWS) * _blocks(outputs, GATED_OUTPUTS)
    return all_tiles >= _MIN_SHARE_OF_WAVES * _blocks(all_tiles, programs) * programs


def _is_persistent(shape: LinearShape, device: DeviceTraits) -> bool:
    has_layout = device.has_tma and shape.is_bulk and shape.is_bulk_out
    return has_layout and is_persistent_shape(
        shape.rows, shape.outputs, shape.inputs, shape.dtype, device.multiprocessors
    )


def _can_use_tma(shape: LinearShape, device: DeviceTraits, *, is_paired: bool) -> bool:
    has_type = shape.dtype in (HALF_TYPES if is_paired else TMA_TYPES)
    if not (device.has_tma and shape.is_bulk and has_type and shape.rows > 0):
        return False
    copies, rest = divmod(shape.inputs * shape.dtype.itemsize, COPY_BYTES)
    return rest == 0 and copies >= _MIN_COPIES and (not is_paired or shape.outputs % (2 * PAIRED) == 0)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
