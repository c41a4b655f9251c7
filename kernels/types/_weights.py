"""The formats of a linear layer's weight, one value type each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.types._code_tiles import CHUNKS, OUTPUTS

# The most rows that read the codes of a quantised weight with an expanded copy.
MOST_ROWS_BESIDE_MANY = 64


class DenseWeight(NamedTuple):
    """A weight in the model's dtype.

    is_batch_invariant: on a GPU a row's result is the same to the last bit among any number of other rows,
    except in float64. is_library_ordered: the library's products with such a weight have the bits of the
    project's kernels, so that it may compute many rows.
    """

    values: torch.Tensor  # [out, in] float
    is_batch_invariant: bool = False
    is_library_ordered: bool = False


class Float8Weight(NamedTuple):
    """A weight in float8 with a per-tensor scale, for inputs in float8 with a per-tensor scale; both have 4
    significant bits.

    It serves draft models, which may be wrong. Inputs are float8_e4m3fn already, or they are quantised to
    multiples of `step` first.
    """

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [1] float32: values times scale are the weight
    step: torch.Tensor  # [1] float32: inputs are multiples of it, at most 448 times it
    dtype: torch.dtype  # of the products


class Int4ScreenedWeight(NamedTuple):
    """A weight in 4 bits and in full, for the output layer of drafters, of which mostly the greatest output
    matters.

    Few rows read the 4-bit weight, and the full weight only for outputs that could be the greatest: see
    `screened_linear`. More rows read `many`.
    """

    exact: torch.Tensor  # [out, in] float
    packed: torch.Tensor  # [out, in // 2] int8: from pack_nibbles
    scales: torch.Tensor  # [out] float32: as in `screened_linear`, and so the next two
    errors: torch.Tensor  # [out] float32
    spreads: torch.Tensor  # [2] float32
    many: DenseWeight | Float8Weight


class PackedCpuWeight(NamedTuple):
    """A float32 weight in oneDNN's layout. Inputs with fewer than least_rows rows are padded: see
    `packed_linear`."""

    packed: torch.Tensor  # opaque to PyTorch's other operations
    least_rows: int


class IntegerCpuWeight(NamedTuple):
    """A weight in codes of 4 or 8 bits with a scale for each output and 32 inputs, for inputs in float32: see
    `integer_cpu_linear`."""

    tiles: torch.Tensor  # [ceil(out / 8), ceil(in / 32), 160 or 272] uint8: scales, minimums, codes
    bits: int
    num_outputs: int
    num_inputs: int


class QuantizedWeight(NamedTuple):
    """A weight of bfloat16 values (code - zero point) * scale, computed in float32 and rounded once. Products
    have the bits of products with the expanded weight, in the order of sums of `ordered_linear`.

    codes: float8_e4m3fn (8 bits) or integers from 0 to 15 (4 bits), in the order of `pack_codes`; paired
    outputs have the order of `paired_outputs`. scales: one for all inputs of an output, or one for each 128
    of them, in the same order of outputs. zeros: the zero points of integers in the same order; None: all are
    8. is_library_ordered: see DenseWeight; it concerns the expanded weight. rest: further outputs of an
    unpaired weight, which are not quantised and follow the others. many: the expanded weight, which
    multiplies more than MOST_ROWS_BESIDE_MANY rows; None: the weight is expanded for each product of many
    rows.
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
        """Returns the number of quantised outputs."""
        return self.codes.shape[0] * OUTPUTS

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (out, in)."""
        others = 0 if self.rest is None else len(self.rest)
        return self.num_coded + others, self.codes.shape[1] * CHUNKS[self.bits]


Weight = (
    DenseWeight | Float8Weight | Int4ScreenedWeight | PackedCpuWeight | IntegerCpuWeight | QuantizedWeight
)
