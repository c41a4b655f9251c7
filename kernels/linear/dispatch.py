"""Chooses the kernel of a linear layer: a pure function of sizes and of the device's traits.

The thresholds were measured on an H200. Knows no tensors; `choice_of` in _hopper_core.py reads the sizes and
traits from tensors.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from headway.kernels.runtime._triton import blocks_of

# With more than FEW_ROWS rows the library is as fast as the skinny kernel, unless sums are more than twice as
# long as the result is wide. Skinny kernels compute up to MAX_ROWS rows, those of gates up to MANY_ROWS.
FEW_ROWS, MAX_ROWS = 32, 64
MIN_INPUTS_MULTIPLE = 64
# Models up to this width fuse more operations, because launches cost time if products are short. With nine
# and with six launches per layer a round takes an H200 0.80 and 0.71 ms at batch 1 and width 1,024, 0.94 and
# 0.74 at batch 8, and 4.14 and 4.21 at batch 4 and width 4,096. The number of rows must not decide, because a
# row's result is the same among up to FEW_ROWS rows.
MAX_HIDDEN_OF_FEW_LAUNCHES = 2048
# From this number of rows on norms are bound by memory, and the library adds a product to the residual at no
# cost: an H200 takes 7.59 ms instead of 7.62 for a round of 32 rows, 20.2 instead of 20.35 for 128 with
# prompts (7B shape, depth 3).
MIN_ADDED_ROWS = 128
# With more rows float8 is as fast as 4 bits if logits are flat. Sums are short below _LONG_SUM inputs.
_MAX_SCREENED_ROWS, _MAX_SCREENED_ROWS_OF_SHORT_SUMS, _LONG_SUM = 16, 8, 2048
_MAX_FLOAT8_SKINNY_ROWS = 16
# A TMA kernel computes a tile of OUTPUTS outputs, and a copy has COPY_BYTES of each. If the tile of rows is
# the largest and all programs run at once, small copies leave less work after the last copy.
OUTPUTS, COPY_BYTES, SMALL_COPY_BYTES = 64, 512, 256
# Unsplit sums of up to MAX_ROWS / 2 rows use thin tiles if nearly every multiprocessor then has a program and
# memory is no faster than an H100's. `down` of one row takes an H100 31.4 us in thin tiles, 35.1 in tiles of
# OUTPUTS, 31.5 in two parts. An H200 takes 25.9 us in thin tiles and 23.8 in tiles of OUTPUTS, and for `o`
# 12.9 and 11.3.
THIN_OUTPUTS, _MIN_SHARE_OF_THIN, _MAX_BANDWIDTH_OF_THIN = 32, 0.9, 4e12
# A part of fewer copies takes longer to reduce than to compute; fewer programs issue too few loads at once.
_MIN_COPIES, _MIN_SHARE_OF_PROGRAMS = 8, 0.7
# The last part of a split sum has this number of large copies more than the others, for whose sums it waits.
_MORE_OF_LAST, _MAX_SPLIT = 4.5, 4
# For gates of up to MANY_ROWS rows a program computes several tiles, so that all programs run in one wave.
MANY_ROWS, _MANY_TILES, _MIN_SHARE_OF_MANY = 128, (2, 3), 0.75
# Runs of this number of outputs of a gate and of `up` alternate.
PAIRED = 8
# The tiles of the persistent kernel of gates, and the sizes from which on it is faster than the library.
GATED_ROWS, GATED_OUTPUTS, GATED_INPUTS = 128, 256, 64
MIN_GATED_ROWS, _MIN_GATED_INPUTS, _MIN_SHARE_OF_WAVES = 640, 1024, 0.94
HALF_TYPES = torch.bfloat16, torch.float16
TMA_TYPES = *HALF_TYPES, torch.float8_e4m3fn


class KernelTraits(NamedTuple):
    """A kernel's promises about its results. ordered_dtypes: the dtypes of weights for which sums have one
    order for any number of rows."""

    order_of_sums: str
    rounding: str
    ordered_dtypes: tuple[torch.dtype, ...] = ()


class LinearKernel(Enum):
    """The kernels that compute linear layers, with their promises."""

    TMA = KernelTraits(
        "MMA instructions of 16 inputs (32 in float8) begin at the tile's first input and wrap around within a part of the "
        "sum; parts are added by ascending index. The weight's shape alone decides for up to 64 rows; gates of 65 to 128 rows "
        "begin at other inputs. An ordered weight has the order of BATCH_INVARIANT.",
        "Accumulation is in float32 (in float8 as the tensor core does it), and so are scale, bias and residual; the result is "
        "rounded once. Gates and their factors are rounded before the activation, and the activation before the product. "
        "With an ordered weight the product is also rounded before a residual is added.",
    )
    SKINNY = KernelTraits(
        "Inputs are added in ascending order within a part of the sum; parts are added by ascending index. The weight's shape "
        "alone decides for up to 32 rows, and for up to 64 if sums are longer than twice the number of outputs.",
        "Accumulation, deferred norm, bias and residual are in float32; the result is rounded once. Queries, keys and values "
        "are rounded before the rotation, gates as with TMA, and a residual before the next norm's weight multiplies it.",
    )
    PERSISTENT_GATED = KernelTraits(
        "Inputs are added in ascending order by MMA instructions of 16 inputs, whatever the number of rows.",
        "Accumulation is in float32; the result is rounded once, and gates as with TMA.",
    )
    LIBRARY = KernelTraits(
        "The library decides, which may depend on the number of rows. A library-ordered weight has the order of "
        "BATCH_INVARIANT.",
        "The library's product is rounded once, with bias or residual, and gates as with TMA.",
    )
    BATCH_INVARIANT = KernelTraits(
        "Inputs are added in ascending order by MMA instructions of one kind, in one accumulator, whatever the number of rows.",
        "Accumulation and bias are in float32; the result is rounded once, and gates as with TMA.",
        (torch.bfloat16, torch.float16, torch.float32),
    )
    WEIGHT_ONLY = KernelTraits(
        "The order is that of BATCH_INVARIANT for up to 128 rows; more rows multiply an expanded copy of the weight.",
        "The multiplied values are (code - zero point) * scale in float32, rounded once; the rest is as with BATCH_INVARIANT.",
        (torch.uint8,),
    )
    FLOAT8_SKINNY = KernelTraits(
        "Inputs are added in ascending order by MMA instructions of 32 inputs, for up to 16 rows.",
        "Inputs are rounded to float8. The tensor core accumulates; the scale is in float32, and the result is rounded once.",
    )
    INT4_SCREENED = KernelTraits(
        "Integer sums are exact in any order. Exact outputs are summed in the order of threads, whatever the number of rows.",
        "Inputs are rounded to 8 bits. Exact outputs are summed in float32; the result is rounded once.",
    )
    PADDED_CPU = KernelTraits(
        "The library decides, for rows that are padded to multiples of 16 and multiplied up to 128 at a time. In 16 bits the "
        "order may depend on the number of rows.",
        "The library accumulates; the result is rounded once, with the bias.",
        (torch.float32, torch.float64),
    )
    PACKED_CPU = KernelTraits(
        "oneDNN decides; that the order is the same for any number of rows is tried before it is relied on.",
        "Accumulation is in float32, without rounding after it.",
        (torch.float32,),
    )


class FusedOperation(Enum):
    """The operations that a launch fuses with the product, as far as the choice of the kernel depends on
    them."""

    ADD = "optional bias, scale and residual"
    ADD_DEFERRED = "optional bias and residual of a product with a deferred norm"
    ADD_NORM = "optional bias, residual, and the deferred norm of what follows"
    GATED_MUL = "gated activation"
    GATED_MUL_BIASED = "bias and gated activation"
    GATED_MUL_DEFERRED = "optional bias and gated activation of a product with a deferred norm"
    QKV = "optional bias, rotary embedding and KV cache"
    QKV_DEFERRED = "optional bias, rotary embedding and KV cache of a product with a deferred norm"


class WeightFormat(Enum):
    """The weight formats for which sizes decide the kernel. On a CPU a format has one kernel: PADDED_CPU or
    PACKED_CPU."""

    PLAIN = "weight and inputs of one dtype, which may be float8"
    ORDERED = "as PLAIN, summed by ascending input in one accumulator, whatever the number of rows"
    LIBRARY_ORDERED = "as ORDERED, and the library is known to sum in that order for more than MAX_ROWS rows"
    FLOAT8_OF_16_BITS = "a weight in float8 for inputs in 16 bits, which are quantised first"
    INT4_SCREENED = "a weight in 4 bits, and in full"


class LinearShape(NamedTuple):
    """Sizes of a product and the layout of its operands."""

    rows: int
    outputs: int  # rows of the weight
    inputs: int
    dtype: torch.dtype  # of both operands
    is_dense: bool = True  # the weight has no gaps, and neither have the inputs of a row
    is_bulk: bool = True  # is_dense, and TMA can copy both operands
    is_bulk_out: bool = True  # TMA can write the result
    format: WeightFormat = WeightFormat.PLAIN


class DeviceTraits(NamedTuple):
    """The properties of a device on which the choice of a kernel depends."""

    multiprocessors: int
    has_tma: bool  # Hopper with Gluon
    has_triton: bool = True
    is_interpreted: bool = False  # Triton's interpreter, which computes in float32
    bandwidth: float = 0.0  # of the memory, nominal, in bytes a second; 0: not known


class TmaGemmConfig(NamedTuple):
    """The grid and the pipeline of a TMA kernel.

    Up to MAX_ROWS the number of rows changes the size of copies, but not the order of sums, because parts and
    tiles begin at the same inputs: of 4096 inputs of 16 bits tile 3 begins with large copy 12 of 16, or with
    small copy 24 of 32, which is input 3072. So a row's result is the same for any number of rows.
    """

    programs: int
    split: int = 1  # parts of a sum (split-K)
    part_copies: int = 0  # copies of each part but the last
    tiles: int = 1  # tiles of a program
    copy_bytes: int = COPY_BYTES  # bytes of an output in a copy
    outputs: int = OUTPUTS  # outputs of a tile
    is_ordered: bool = False  # sums begin with the first input


class LinearChoice(NamedTuple):
    """The kernel of a launch. config: of a TMA kernel."""

    kernel: LinearKernel
    config: TmaGemmConfig | None = None


def choose(shape: LinearShape, device: DeviceTraits, operation: FusedOperation) -> LinearChoice:
    """Returns the kernel for a launch, with its configuration if it is a TMA kernel."""
    if shape.format in (WeightFormat.ORDERED, WeightFormat.LIBRARY_ORDERED):
        return _choose_ordered(shape, device, operation)
    kernel = _kernel_of_format(shape, device)
    if kernel is not None:
        return LinearChoice(kernel)
    config = _tma_config(shape, device, operation)
    if config is not None:
        return LinearChoice(LinearKernel.TMA, config)
    if is_skinny(shape, device):
        return LinearChoice(LinearKernel.SKINNY)
    if operation is FusedOperation.GATED_MUL and _is_persistent(shape, device):
        return LinearChoice(LinearKernel.PERSISTENT_GATED)
    return LinearChoice(LinearKernel.LIBRARY)


def _choose_ordered(shape: LinearShape, device: DeviceTraits, operation: FusedOperation) -> LinearChoice:
    """Returns the choice among kernels that sum by ascending input in one accumulator: their results are the
    same to the last bit."""
    config = ordered_tma_config(shape, device, operation)
    if config is not None:
        return LinearChoice(LinearKernel.TMA, config)
    if operation is FusedOperation.GATED_MUL and _is_persistent(shape, device):
        return LinearChoice(LinearKernel.PERSISTENT_GATED)
    if shape.format is WeightFormat.LIBRARY_ORDERED and shape.rows > MAX_ROWS:
        return LinearChoice(LinearKernel.LIBRARY)
    return LinearChoice(LinearKernel.BATCH_INVARIANT)


def ordered_tma_config(
    shape: LinearShape, device: DeviceTraits, operation: FusedOperation
) -> TmaGemmConfig | None:
    """Returns the configuration without split-K; None if the kernel does not support the product."""
    if operation in (FusedOperation.GATED_MUL, FusedOperation.GATED_MUL_BIASED) and shape.rows > MAX_ROWS:
        config = tma_config_of_many(shape, device)
        return config and config._replace(is_ordered=True)
    is_paired = operation is not FusedOperation.ADD
    if not _can_use_tma(shape, device, is_paired=is_paired) or shape.rows > MAX_ROWS:
        return None
    is_few = shape.rows <= MAX_ROWS // 2
    share = blocks_of(shape.outputs, THIN_OUTPUTS) / device.multiprocessors
    is_slow = device.bandwidth <= _MAX_BANDWIDTH_OF_THIN
    is_thin = is_slow and is_few and not is_paired and _MIN_SHARE_OF_THIN <= share <= 1
    outputs = THIN_OUTPUTS if is_thin else OUTPUTS
    programs = blocks_of(shape.outputs, outputs)
    is_small = not is_few and programs <= device.multiprocessors
    copy_bytes = SMALL_COPY_BYTES if is_small else COPY_BYTES
    return TmaGemmConfig(programs, copy_bytes=copy_bytes, outputs=outputs, is_ordered=True)


def _kernel_of_format(shape: LinearShape, device: DeviceTraits) -> LinearKernel | None:
    """Returns the kernel of this format alone; None: the product is computed as with a plain weight."""
    match shape.format:
        case WeightFormat.FLOAT8_OF_16_BITS if device.has_triton and shape.rows <= _MAX_FLOAT8_SKINNY_ROWS:
            return LinearKernel.FLOAT8_SKINNY
        # More rows read another weight.
        case WeightFormat.INT4_SCREENED if shape.rows <= most_screened_rows(shape.inputs):
            return LinearKernel.INT4_SCREENED
    return None


def most_screened_rows(num_inputs: int) -> int:
    """Returns the most rows that are computed with 4-bit weights."""
    return _MAX_SCREENED_ROWS if num_inputs >= _LONG_SUM else _MAX_SCREENED_ROWS_OF_SHORT_SUMS


def adds_residual(shape: LinearShape, device: DeviceTraits, *, has_bias: bool) -> bool:
    """Returns whether the product's epilogue should add the residual; otherwise the following norm should.
    With an ordered weight both round at the same points."""
    kernel = choose(shape, device, FusedOperation.ADD).kernel
    if shape.format is not WeightFormat.PLAIN:
        return kernel is LinearKernel.TMA
    if kernel is LinearKernel.SKINNY:
        return is_short_stream(shape.rows, shape.outputs, shape.dtype)
    return kernel is LinearKernel.TMA or (shape.rows >= MIN_ADDED_ROWS and not has_bias)


def fuses_qkv(shape: LinearShape, device: DeviceTraits, *, is_deferred: bool) -> bool:
    """Returns whether one launch should compute, rotate and cache queries, keys and values, if their heads
    have the form for it."""
    operation = FusedOperation.QKV_DEFERRED if is_deferred else FusedOperation.QKV
    kernel = choose(shape, device, operation).kernel
    is_short = is_short_stream(shape.rows, shape.inputs, shape.dtype)
    return kernel is LinearKernel.TMA or (kernel is LinearKernel.SKINNY and (is_deferred or is_short))


def is_short_stream(rows: int, hidden: int, dtype: torch.dtype) -> bool:
    """Returns whether products around a residual stream of these sizes should fuse the operations before and
    after them. Float16 is excluded, because the stream could overflow when a deferred norm's weight
    multiplies it before the norm divides it."""
    has_width = hidden <= MAX_HIDDEN_OF_FEW_LAUNCHES and hidden % MIN_INPUTS_MULTIPLE == 0
    return 0 < rows <= FEW_ROWS and has_width and dtype == torch.bfloat16


def is_skinny(shape: LinearShape, device: DeviceTraits) -> bool:
    """Returns whether the skinny kernel computes the product if no other kernel is preferred."""
    has_type = shape.dtype == torch.float32 if device.is_interpreted else shape.dtype in HALF_TYPES
    most_rows = MAX_ROWS if shape.inputs > 2 * shape.outputs else FEW_ROWS
    has_shape = 0 < shape.rows <= most_rows and shape.inputs % MIN_INPUTS_MULTIPLE == 0
    return device.has_triton and has_type and has_shape and shape.is_dense


def _tma_config(shape: LinearShape, device: DeviceTraits, operation: FusedOperation) -> TmaGemmConfig | None:
    if operation is FusedOperation.ADD:
        return tma_config(shape, device, is_paired=False)
    if operation is FusedOperation.QKV:
        return tma_config(shape, device, is_paired=True)
    if operation in (FusedOperation.GATED_MUL, FusedOperation.GATED_MUL_BIASED):
        return tma_config(shape, device, is_paired=True) or tma_config_of_many(shape, device)
    return None


def tma_config(shape: LinearShape, device: DeviceTraits, *, is_paired: bool) -> TmaGemmConfig | None:
    """Returns the configuration for up to MAX_ROWS rows; None if the kernel does not support the product.

    is_paired: outputs form pairs (a gate and its `up`, or the halves of a head), whose sums are never split.
    """
    if not _can_use_tma(shape, device, is_paired=is_paired) or shape.rows > MAX_ROWS:
        return None
    copies = shape.inputs * shape.dtype.itemsize // COPY_BYTES
    tiles = blocks_of(shape.outputs, OUTPUTS)
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
    """Returns the configuration for gates of MAX_ROWS + 1 to MANY_ROWS rows; None if the kernel does not
    support the product."""
    if not _can_use_tma(shape, device, is_paired=True) or not MAX_ROWS < shape.rows <= MANY_ROWS:
        return None
    all_tiles = blocks_of(shape.outputs, OUTPUTS)
    tiles = blocks_of(all_tiles, device.multiprocessors)
    programs = blocks_of(all_tiles, tiles)
    is_enough = tiles in _MANY_TILES and programs >= _MIN_SHARE_OF_MANY * device.multiprocessors
    return TmaGemmConfig(programs, tiles=tiles, copy_bytes=SMALL_COPY_BYTES) if is_enough else None


def is_persistent_shape(rows: int, outputs: int, inputs: int, dtype: torch.dtype, programs: int) -> bool:
    """Returns whether the persistent kernel of gates supports these sizes, and its waves fill that number of
    multiprocessors well enough."""
    has_shape = rows >= MIN_GATED_ROWS and inputs >= _MIN_GATED_INPUTS and inputs % GATED_INPUTS == 0
    if dtype not in HALF_TYPES or not has_shape or outputs % (2 * PAIRED) > 0:
        return False
    all_tiles = blocks_of(rows, GATED_ROWS) * blocks_of(outputs, GATED_OUTPUTS)
    return all_tiles >= _MIN_SHARE_OF_WAVES * blocks_of(all_tiles, programs) * programs


def most_gated_rows(most: int, outputs: int, inputs: int, dtype: torch.dtype, device: DeviceTraits) -> int:
    """Returns the largest number of rows, up to `most`, whose gated product the persistent kernel computes;
    0: there is none."""
    if not device.has_tma:
        return 0
    sizes = (most, *range(most // GATED_ROWS * GATED_ROWS, MIN_GATED_ROWS - 1, -GATED_ROWS))
    programs = device.multiprocessors
    return next((n for n in sizes if is_persistent_shape(n, outputs, inputs, dtype, programs)), 0)


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
