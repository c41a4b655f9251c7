"""The formats of a linear layer's weight, one value type each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.types._code_tiles import CHUNKS, OUTPUTS

# Of quantised weights that have an expanded copy, rows that read the codes at most.
MOST_ROWS_BESIDE_MANY = 64


class DenseWeight(NamedTuple):
    """A weight in the model's dtype.

    is_batch_invariant: on a GPU a row's result is the same to the last bit among any number of other rows,
    but in float64. is_library_ordered: of such a weight the library's products have the bits of the project's
    kernels; it may compute many rows.
    """

    values: torch.Tensor  # [out, in] float
    is_batch_invariant: bool = False
    is_library_ordered: bool = False


class Float8Weight(NamedTuple):
    """A weight with one scale for all, for inputs in float8 with one scale for all: 4 significant bits each.

    For drafts, which may be wrong. Inputs are float8_e4m3fn already, or are rounded to multiples of `step`
    first.
    """

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [1] float32: values times scale are the weight
    step: torch.Tensor  # [1] float32: inputs are multiples of it, at most 448 times it
    dtype: torch.dtype  # of the products


class Int4ScreenedWeight(NamedTuple):
    """A weight in 4 bits and the exact one, for what mostly asks for the greatest output: drafts.

    Few rows read the 4 bits and, of outputs that could be the greatest, the exact weight; see
    `screened_linear`. More rows read `many`.
    """

    exact: torch.Tensor  # [out, in] float
    packed: torch.Tensor  # [out, in // 2] int8: of pack_nibbles
    scales: torch.Tensor  # [out] float32
    errors: torch.Tensor  # [out] float32
    spreads: torch.Tensor  # [2] float32
    many: DenseWeight | Float8Weight


class PackedCpuWeight(NamedTuple):
    """A float32 weight in oneDNN's layout. Inputs of fewer rows than least_rows are padded: see
    `packed_linear`."""

    packed: torch.Tensor
    least_rows: int


class IntegerCpuWeight(NamedTuple):
    """A weight in codes of 4 or 8 bits with a scale of each output and 32 inputs, for inputs in float32: see
    `integer_cpu_linear`."""

    tiles: torch.Tensor  # [ceil(out / 8), ceil(in / 32), 160 or 272] uint8: scales, minimums, codes
    bits: int
    num_outputs: int
    num_inputs: int


class QuantizedWeight(NamedTuple):
    """A weight of bfloat16 values, each a code, less its zero point, times its scale, in float32 and rounded
    once. Products have the bits that those with the expanded weight have, in the one order of sums.

    codes: float8_e4m3fn (8 bits), or integers from 0 to 15, in the order of `pack_codes`, outputs in the
    order of `paired_outputs` where they are paired. scales: of an output and all its inputs, or of each 128
    of them, outputs in that order, too; zeros: of integers, likewise, or None for 8. is_library_ordered: of
    the expanded weight, see DenseWeight. rest: further outputs, which are no codes and follow the others; of
    a weight that is not paired. many: the expanded weight, by which more than MOST_ROWS_BESIDE_MANY rows
    multiply; None: it is expanded for a product.
    """

    codes: torch.Tensor  # [out / 64, in / chunk, 128, 16] uint8
    scales: torch.Tensor  # [1 or in / 128, out] bfloat16 or float32
    zeros: torch.Tensor | None  # as scales
    bits: int
    is_paired: bool
    is_library_ordered: bool = False
    rest: torch.Tensor | None = None  # [out, in] bfloat16
    many: DenseWeight | None = None

    @property
    def num_coded(self) -> int:
        """Returns the outputs that are codes."""
        return self.codes.shape[0] * OUTPUTS

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (out, in)."""
        others = 0 if self.rest is None else len(self.rest)
        return self.num_coded + others, self.codes.shape[1] * CHUNKS[self.bits]


Weight = (
    DenseWeight | Float8Weight | Int4ScreenedWeight | PackedCpuWeight | IntegerCpuWeight | QuantizedWeight
)
