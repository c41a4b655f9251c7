"""Linear layers with a weight of any format, and their prologues and epilogues.

`linear` computes a layer in one call, by the kernel that `dispatch.py` chooses. The other functions tell
callers what they must know of that choice: whether a residual addition, a norm or the update of the KV cache
is best fused with the product.
"""

from __future__ import annotations

import torch

from headway.kernels.elementwise.gated_mul import gated_mul
from headway.kernels.linear import dispatch
from headway.kernels.linear._batch_invariant_tiles import rows_of_each_tile
from headway.kernels.linear._cpu_linear import packed_linear
from headway.kernels.linear._hopper_core import shape_of, traits_of
from headway.kernels.linear._integer_cpu_linear import integer_cpu_linear
from headway.kernels.linear._ordered_linear import ordered_linear
from headway.kernels.linear._quantized_weight import multiplies_codes, rows_of_each_code_kernel
from headway.kernels.linear.add_linear import add_linear
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel, WeightFormat
from headway.kernels.linear.float8_linear import float8_linear
from headway.kernels.linear.gated_linear import gated_linear
from headway.kernels.linear.quantized_linear import quantized_linear
from headway.kernels.linear.screened_linear import screened_linear
from headway.kernels.linear.skinny_linear import skinny_linear
from headway.kernels.linear.weight_only_linear import weight_only_linear
from headway.kernels.reference.linear._padded_linear import padded_linear
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.types._epilogue import PLAIN, Activation, Epilogue
from headway.kernels.types._weights import (
    MOST_ROWS_BESIDE_MANY,
    DenseWeight,
    Float8Weight,
    Int4ScreenedWeight,
    IntegerCpuWeight,
    PackedCpuWeight,
    QuantizedWeight,
    Weight,
)


def linear(
    x: Activation,
    weight: Weight,
    epilogue: Epilogue = PLAIN,
    *,
    out: torch.Tensor | None = None,  # [rows, out]; may be the residual
) -> Activation:
    """Returns x @ weight.T with its epilogue, [rows, out], or [rows, out / 2] with a gate, in x's dtype (in
    the weight's `dtype` for float8 inputs).

    With a next_norm, out is not written, and the norm of the result is deferred; with an IntegerCpuWeight it
    is complete. Only dense weights that are not batch-invariant support deferred norms. No launch that is
    still running may write the weight. Asserts that the format supports the epilogue; raises MemoryError if
    an IntegerCpuWeight finds no memory for its inputs.
    """
    weight = _of_rows(x.values, weight)
    if isinstance(weight, DenseWeight) and _fuses(x, weight, epilogue):
        return _fused(x, weight.values, epilogue, out)
    assert x.deferred is None, "this weight's format is for inputs whose norm is complete"
    if isinstance(weight, IntegerCpuWeight) and (epilogue.residual is None or epilogue.next_norm is not None):
        product = integer_cpu_linear(x.values, weight, epilogue)
        return Activation(product if out is None or epilogue.next_norm is not None else out.copy_(product))
    bias, gate, residual, norm = epilogue
    assert norm is None, "this weight's format defers no norm"
    if isinstance(weight, QuantizedWeight):
        return Activation(weight_only_linear(x.values, weight, bias, gate=gate, residual=residual, out=out))
    if isinstance(weight, DenseWeight) and weight.is_batch_invariant and x.values.is_cuda:
        own, form = weight.values, format_of(weight)
        return Activation(
            ordered_linear(x.values, own, bias, gate=gate, residual=residual, out=out, weight_format=form)
        )
    product = _product(x.values, weight, bias)
    if gate is not None:
        product = gated_mul(product, gate)
    if residual is not None:
        return Activation(torch.add(residual, product, out=out))
    return Activation(product if out is None else out.copy_(product))


def _of_rows(
    x: torch.Tensor,  # [rows, in]
    weight: Weight,
) -> Weight:
    """Returns the weight's expanded copy if it has one and the number of rows calls for it, else the
    weight."""
    if isinstance(weight, QuantizedWeight) and weight.many is not None and len(x) > MOST_ROWS_BESIDE_MANY:
        return weight.many
    return weight


def has_order(weight: Weight, device: torch.device) -> bool:
    """Returns whether the weight's products on that device have one order of sums for any number of rows. For
    a dense weight: whether they have it when is_batch_invariant is set."""
    match weight:
        case DenseWeight(values):
            kernel = LinearKernel.BATCH_INVARIANT if device.type == "cuda" else LinearKernel.PADDED_CPU
        case PackedCpuWeight(values):
            kernel = LinearKernel.PACKED_CPU
        case IntegerCpuWeight():
            return True
        case Float8Weight(values):
            kernel = LinearKernel.FLOAT8_SKINNY
        case Int4ScreenedWeight(packed=values):
            kernel = LinearKernel.INT4_SCREENED
        case QuantizedWeight(codes=values):
            kernel = LinearKernel.WEIGHT_ONLY
    return values.dtype in kernel.value.ordered_dtypes


def adds_residual(
    x: torch.Tensor,  # [rows, in]
    weight: Weight,
    *,
    has_bias: bool,
) -> bool:
    """Returns whether the product's epilogue should add the residual; otherwise the following norm should."""
    weight = _of_rows(x, weight)
    if isinstance(weight, QuantizedWeight):
        return multiplies_codes(x)
    if not isinstance(weight, DenseWeight) or not x.is_cuda:
        return False
    shape = shape_of(x, weight.values)._replace(format=format_of(weight))
    return dispatch.adds_residual(shape, traits_of(x), has_bias=has_bias)


def defers_norm(
    residual: torch.Tensor,  # [rows, hidden]
    writer: Weight,
    reader: Weight,
) -> bool:
    """Returns whether the norm between two linear layers should be fused with their products: with the
    epilogue of the writer, which adds to the residual, and the prologue of the reader."""
    if isinstance(writer, IntegerCpuWeight):
        return isinstance(reader, IntegerCpuWeight)
    is_short = dispatch.is_short_stream(len(residual), residual.shape[1], residual.dtype)
    return residual.is_cuda and is_short and _takes_skinny(writer) and _takes_skinny(reader)


def fuses_qkv(x: Activation, weight: Weight) -> bool:
    """Returns whether `qkv_rope_append` should compute this product. The caller checks the form of its
    heads."""
    if not isinstance(weight, DenseWeight) or not x.values.is_cuda:
        return False
    shape = shape_of(x.values, weight.values)._replace(format=format_of(weight))
    return dispatch.fuses_qkv(shape, traits_of(x.values), is_deferred=x.deferred is not None)


def most_gated_rows(
    most: int, weight_shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> int:
    """Returns the largest number of rows, up to `most`, whose gated product the persistent kernel computes;
    0: there is none."""
    return dispatch.most_gated_rows(most, *weight_shape, dtype, traits_of(torch.empty(0, device=device)))


def rows_of_each_kernel(weight: Weight, most_rows: int) -> list[int]:
    """Returns numbers of rows, up to most_rows, that together use every kernel of a batch-invariant weight,
    so that a warm-up compiles all of them.

    The list is empty if the library computes many rows, and for other weights. Gates are not considered:
    captured steps of few prompt tokens have gates of few rows.
    """
    if isinstance(weight, QuantizedWeight) and weight.many is not None:
        few = rows_of_each_code_kernel(min(most_rows, MOST_ROWS_BESIDE_MANY))
        of_many = rows_of_each_kernel(weight.many, most_rows)
        return few + [rows for rows in of_many if rows > MOST_ROWS_BESIDE_MANY]
    if isinstance(weight, QuantizedWeight):
        few = rows_of_each_code_kernel(most_rows)
        return (
            few if weight.is_library_ordered else few + _rows_of_tiles(weight.codes, weight.shape, most_rows)
        )
    if not isinstance(weight, DenseWeight) or format_of(weight) is not WeightFormat.ORDERED:
        return []
    outputs, inputs = weight.values.shape
    return _rows_of_tiles(weight.values, (outputs, inputs), most_rows)


def _rows_of_tiles(stored: torch.Tensor, shape: tuple[int, int], most_rows: int) -> list[int]:
    return rows_of_each_tile(most_rows, shape[1], shape[0], multiprocessors(stored.device))


def format_of(weight: DenseWeight) -> WeightFormat:
    """Returns the format of the weight for `dispatch`."""
    if not weight.is_batch_invariant:
        return WeightFormat.PLAIN
    return WeightFormat.LIBRARY_ORDERED if weight.is_library_ordered else WeightFormat.ORDERED


def _takes_skinny(weight: Weight) -> bool:
    if not isinstance(weight, DenseWeight) or weight.is_batch_invariant:
        return False
    return weight.values.shape[1] % dispatch.MIN_INPUTS_MULTIPLE == 0


def _fuses(x: Activation, weight: DenseWeight, epilogue: Epilogue) -> bool:
    """Returns whether a fused kernel computes the product. On a CPU only deferred norms need one: the twins
    promise no order of sums."""
    is_deferred = x.deferred is not None or epilogue.next_norm is not None
    return not weight.is_batch_invariant and (x.values.is_cuda or is_deferred)


def _fused(x: Activation, weight: torch.Tensor, epilogue: Epilogue, out: torch.Tensor | None) -> Activation:
    bias, gate, residual, norm = epilogue
    if norm is not None:
        assert residual is not None, "a norm follows a residual addition"
        assert (x.deferred, gate) == (None, None), "no kernel computes all that"
        return Activation(
            *add_linear(
                x.values, weight, residual, norm.weight, norm.epsilon, bias=bias, unit_offset=norm.unit_offset
            )
        )
    if gate is None:
        return Activation(skinny_linear(x.values, weight, bias, norm=x.deferred, residual=residual, out=out))
    assert residual is None, "no kernel adds a gated product to a residual"
    return Activation(gated_linear(x.values, weight, bias, activation=gate, norm=x.deferred, out=out))


def _product(
    x: torch.Tensor,  # [rows, in]
    weight: DenseWeight | Float8Weight | Int4ScreenedWeight | IntegerCpuWeight | PackedCpuWeight,
    bias: torch.Tensor | None,  # [out]
) -> torch.Tensor:  # [rows, out]
    match weight:
        case DenseWeight(values):
            return padded_linear(x, values, bias)
        case PackedCpuWeight():
            return packed_linear(x, weight, bias)
        case IntegerCpuWeight():
            return integer_cpu_linear(x, weight, Epilogue(bias))
        case Float8Weight(values, scale, step, dtype) if x.dtype == values.dtype:
            return float8_linear(x, values, step, scale, bias, dtype=dtype)
        case Float8Weight(values, scale, step, _):
            assert bias is None, "inputs are rounded for output layers, which have no bias"
            return quantized_linear(x, values, scale, step)
        case Int4ScreenedWeight(exact, packed, scales, errors, spreads, many):
            assert bias is None, "weights in 4 bits are for output layers, which have no bias"
            shape = shape_of(x, exact)._replace(format=WeightFormat.INT4_SCREENED)
            choice = dispatch.choose(shape, traits_of(x), FusedOperation.ADD)
            if choice.kernel is not LinearKernel.INT4_SCREENED:
                return linear(Activation(x), many).values
            return screened_linear(x, exact, packed, scales, errors, spreads)
