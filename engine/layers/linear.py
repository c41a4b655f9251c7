"""A linear layer whose rows do not depend on one another, not even in their last bit.

A GEMM over few rows may round differently from one over many; then a text would depend on what is served
beside it. On the CPU this is ruled out in one of two ways: float32 weights are packed for oneDNN, whose
sums run in one order whatever the number of rows (tried on this machine before it is relied on); all others
take up to ROWS_AT_ONCE rows, with rows of zeros up to a multiple of 16. On a GPU up to 32 rows in 16-bit types
take one kernel whose sums are cut by the weight's shape alone, as up to 64 do of a large weight on Hopper; the
library, which takes more, promises no such thing. `make_batch_invariant` does without it. None of this holds for few
bits, which are for drafts alone: these may be wrong, and so may depend on what else is drafted.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headway.kernels import (
    MIN_INPUTS_MULTIPLE,
    DeferredNorm,
    fixed_linear,
    float8_linear,
    fuses_residual_add,
    gated_linear,
    is_short_stream,
    pack_nibbles,
    quantized_linear,
    screened_linear,
    silu_mul,
    skinny_linear,
)

# An Emerald Rapids Xeon sums in another order from 192 rows on in float64, from 304 in float32.
ROW_MULTIPLE, ROWS_AT_ONCE = 16, 128
CAN_PACK = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
MAX_FLOAT8, TINY = 448.0, 1e-30
QUANTIZED_AT_ONCE = 4096
# With more rows float8 is as fast as 4 bits, where logits are flat; a sum of LONG_SUM inputs or more is a long one.
MAX_SCREENED_ROWS, MAX_SCREENED_ROWS_OF_SHORT_SUMS, LONG_SUM = 16, 8, 2048
# Scales tried for a row of 4-bit integers: such shares of the one that holds its greatest weight. Standard deviations
# by which an output of theirs is taken to be off at most.
SCALE_SHARES, DEVIATIONS = tuple(0.85**power for power in range(13)), 6.0
MIN_NIBBLE, MAX_NIBBLE = -8.0, 7.0
# Of so many rows a GPU's norm is held up by memory, and the library adds a product to the residual for nothing: an H200
# takes 7.59 ms instead of 7.62 for a round of 32 rows, 20.2 instead of 20.35 for 128 with prompts (7B shape, depth 3).
MIN_ADDED_ROWS = 128
TRIED_ROW_COUNTS = (2, 3, 4, 5, 8, 16, 17, 32, 64, 100, 256, 304, 512)


class Activation(NamedTuple):
    """The input of a linear layer, [n, in]: in the weight's dtype, or in float8_e4m3fn as multiples of `input_step`.

    deferred: what the product is still to be multiplied by, where the norm before it was applied but for that.
    """

    values: torch.Tensor
    deferred: DeferredNorm | None = None


class Linear:
    """x W^T + b. Mutable: `pack_all` may take the weight, once it is loaded, and give a packed form of it;
    `make_batch_invariant` chooses the kernel on a GPU, `round_to_float8` inputs and weights of 8 bits."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
    ) -> None:
        self.bias = bias
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        self._least_rows = 1
        self._is_batch_invariant = False
        self._float8: Float8Weight | None = None

    @property
    def weight(self) -> torch.Tensor:  # [out, in]
        assert self._weight is not None, "the weight was given up when it was packed or rounded"
        return self._weight

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]

    def parts(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns views of the weight and the bias by path, some outputs each, in order. sizes: the outputs of each path."""
        tensors = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        return {
            f"{path}.{kind}": part
            for kind, tensor in tensors.items()
            for path, part in zip(sizes, tensor.split_with_sizes(list(sizes.values())), strict=True)
        }

    def __call__(self, x: Activation | torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        if isinstance(x, Activation):
            if x.deferred is not None:
                return skinny_linear(x.values, self.weight, self.bias, norm=x.deferred)
            x = x.values
        if self._float8 is not None:
            weight, scale, step, dtype = self._float8
            return float8_linear(x, weight, step, scale, self.bias, dtype=dtype)
        if x.is_cuda:
            multiply = fixed_linear if self._is_batch_invariant else skinny_linear
            return multiply(x, self.weight, self.bias)
        num_rows = x.shape[0]
        if self._packed is not None:
            if num_rows >= self._least_rows:
                return _multiply_packed(x, self._packed, self.bias)
            return _multiply_packed(_padded(x, self._least_rows), self._packed, self.bias)[:num_rows]
        padding = -num_rows % ROW_MULTIPLE
        padded = _padded(x, num_rows + padding) if padding > 0 else x
        products = [F.linear(rows, self.weight, self.bias) for rows in torch.split(padded, ROWS_AT_ONCE)]
        return (products[0] if len(products) == 1 else torch.cat(products))[:num_rows]

    def added_to(
        self,
        residual: torch.Tensor,  # [n, out], in place where the product adds itself
        x: torch.Tensor,  # [n, in]
    ) -> torch.Tensor | None:
        """Returns what is still to be added to the residual, [n, out]; None: it was added."""
        if not x.is_cuda or self._is_batch_invariant or self._float8 is not None:
            return self(x)
        if fuses_residual_add(x, self.weight) or (self.can_fuse and prefers_few_launches(residual)):
            skinny_linear(x, self.weight, self.bias, residual=residual, out=residual)
            return None
        if x.shape[0] < MIN_ADDED_ROWS or self.bias is not None:
            return self(x)
        torch.addmm(residual, x, self.weight.t(), out=residual)
        return None

    def gated(self, x: Activation) -> torch.Tensor:  # [n, in] -> [n, out / 2]
        """Returns silu of the first half of the outputs times the second half."""
        is_plain = not self._is_batch_invariant and self._float8 is None and self.bias is None
        if is_plain and (x.values.is_cuda or x.deferred is not None):
            return gated_linear(x.values, self.weight, norm=x.deferred)
        return silu_mul(self(x))

    def make_batch_invariant(self) -> None:
        """On a GPU, from now on, a row's result is the same beside any number of others. Not in float64, nor in float8."""
        self._is_batch_invariant = True

    @property
    def can_fuse(self) -> bool:
        """Whether a kernel that computes more than the product may multiply by `weight`."""
        is_plain = self._weight is not None and not self._is_batch_invariant
        return is_plain and self.weight.shape[1] % MIN_INPUTS_MULTIPLE == 0

    @property
    def is_batch_invariant(self) -> bool:
        return self._is_batch_invariant

    @property
    def input_step(self) -> torch.Tensor | None:  # [1] float32
        """Of what inputs are to be multiples, float8_e4m3fn each; None: they are of the weight's dtype."""
        return None if self._float8 is None else self._float8.step

    def round_to_float8(self, *, largest_input: float) -> None:
        """Gives up `weight`: what is multiplied has 4 significant bits. For drafts, which may be a little wrong."""
        dtype, device = self.weight.dtype, self.weight.device
        weight, scale = to_float8(self.weight)
        self._float8 = Float8Weight(weight, scale, float8_step(largest_input, device), dtype)
        self._weight = None

    @property
    def can_be_packed(self) -> bool:
        weight = self.weight
        return CAN_PACK and weight.device.type == "cpu" and weight.dtype == torch.float32

    def pack(self, *, least_rows: int) -> None:
        """Gives up `weight`. least_rows: smaller inputs are padded to that many rows."""
        self._packed, self._weight, self._least_rows = _packed(self.weight), None, least_rows


def prefers_few_launches(
    residual: torch.Tensor,  # [n, hidden], or the norm of one
) -> bool:
    """Returns whether products that read and write this stream also compute what precedes and follows them."""
    return residual.is_cuda and is_short_stream(len(residual), residual.shape[1], residual.dtype)


class Float8Weight(NamedTuple):
    """dtype: of the products."""

    weight: torch.Tensor  # [out, in] float8_e4m3fn
    scale: torch.Tensor  # [1] float32
    step: torch.Tensor  # [1] float32, of inputs
    dtype: torch.dtype


class QuantizedLinear:
    """A copy of a linear layer in float8_e4m3fn, for results that may be a little wrong: drafts."""

    def __init__(
        self,
        linear: Linear,
        *,
        largest_input: float,  # the magnitude that no input exceeds
    ) -> None:
        assert linear.bias is None, "no bias is foreseen"
        weight = linear.weight
        self._weight, self._scale = to_float8(weight)
        self._step = float8_step(largest_input, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        return quantized_linear(x, self._weight, self._scale, self._step)


class ScreenedLinear:
    """A linear layer for what mostly asks for its greatest output, drafts: exact where that could be, else about right.

    Few rows read a copy whose weights take 4 bits and, of outputs that could be the greatest, the layer's own. What is
    picked elsewhere, by chance or since the greatest are not allowed, is picked by 4 bits. Many rows take another layer.
    """

    def __init__(self, linear: Linear, many: Linear | QuantizedLinear) -> None:
        assert linear.bias is None, "no bias is foreseen"
        self._linear, self._many = linear, many
        self._nibbles = quantize_to_nibbles(linear.weight)
        self._most_rows = most_screened_rows(linear.weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        if x.shape[0] > self._most_rows:
            return self._many(x)
        return screened_linear(x, self._linear.weight, *self._nibbles)


def most_screened_rows(num_inputs: int) -> int:
    """So many rows at once `ScreenedLinear` computes by 4 bits."""
    return MAX_SCREENED_ROWS if num_inputs >= LONG_SUM else MAX_SCREENED_ROWS_OF_SHORT_SUMS


def largest_normed(weight: torch.Tensor) -> float:
    """The most that a norm with this weight, [hidden], gives of any input but for rounding: what it multiplies is no
    longer than a vector of ones."""
    return weight.abs().max().item() * math.sqrt(len(weight))


def float8_step(largest_input: float, device: torch.device) -> torch.Tensor:
    """[1] float32: a power of two, so that nothing but float8 itself rounds inputs."""
    step = 2.0 ** math.ceil(math.log2(max(largest_input, TINY) / MAX_FLOAT8))
    return torch.full((1,), step, device=device)


def to_float8(
    weight: torch.Tensor,  # [out, in] float
) -> tuple[torch.Tensor, torch.Tensor]:
    """([out, in] float8_e4m3fn, [1] float32): numbers of 4 significant bits times one scale, about the weight.

    Some rows are converted at a time, so that the memory for intermediate results stays small.
    """
    # The first to take memory: behind what comes and goes here it would keep the allocator from giving that back.
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    parts = torch.split(weight, QUANTIZED_AT_ONCE)
    largest = torch.stack([part.abs().amax() for part in parts]).amax()
    scale = largest.float().clamp(min=TINY).reshape(1) / MAX_FLOAT8
    for part, target in zip(parts, torch.split(rounded, QUANTIZED_AT_ONCE), strict=True):
        target.copy_((part / scale).clamp(-MAX_FLOAT8, MAX_FLOAT8))
    return rounded, scale


def quantize_to_nibbles(
    weight: torch.Tensor,  # [out, in] float, `in` a multiple of 256
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `screened_linear` asks for: [out, in // 2] int8 of pack_nibbles, scales and errors [out] float32, spreads
    [2] float32. Integers from -8 to 7 times the one of SCALE_SHARES by which an output's weights come closest.

    Errors of weights and of inputs are taken to be independent, those of inputs to be evenly spread and, beside those of
    weights, as large in each output. Some rows are converted at a time, as in `to_float8`.
    """
    num_outputs, num_inputs = weight.shape
    packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.int8, device=weight.device)
    scales, errors = (torch.empty(num_outputs, dtype=torch.float32, device=weight.device) for _ in range(2))
    squares = torch.zeros((), dtype=torch.float32, device=weight.device)
    for first in range(0, num_outputs, QUANTIZED_AT_ONCE):
        which = slice(first, first + QUANTIZED_AT_ONCE)
        some = weight[which].float()
        whole = some.abs().amax(1, keepdim=True).clamp(min=TINY) / MAX_NIBBLE
        tried = torch.cat([whole * share for share in SCALE_SHARES], 1)
        tried_errors = [(_nibbles(some, s) * s - some).square().mean(1) for s in torch.split(tried, 1, 1)]
        least, best = torch.stack(tried_errors, 1).min(1)
        scale = tried.gather(1, best[:, None])
        integers = _nibbles(some, scale)
        packed[which], scales[which], errors[which] = pack_nibbles(integers), scale[:, 0], least.sqrt()
        squares += (integers * scale).square().sum()
    # An evenly spread error is a step's square by twelve, in the mean of squares.
    of_inputs = squares / 12 / num_outputs / errors.square().mean().clamp(min=TINY)
    return packed, scales, errors, DEVIATIONS**2 * torch.stack((torch.ones_like(of_inputs), of_inputs))


def _nibbles(
    weight: torch.Tensor,  # [out, in] float32
    scale: torch.Tensor,  # [out, 1] float32
) -> torch.Tensor:  # [out, in] float32
    return (weight / scale).round().clamp(MIN_NIBBLE, MAX_NIBBLE)


def pack_all(linears: Iterable[Linear]) -> None:
    """Packs the layers for which that proves independent of the number of rows; each shape is tried once.

    4 rows through [4096, 256] take 86 us packed, 193 us unpacked, 435 us unpacked with 16 rows (AVX-512,
    one thread). The layers are packed one by one, so that no second copy of the model exists.
    """
    found: dict[tuple[torch.Size, bool], int | None] = {}
    for linear in linears:
        if not linear.can_be_packed:
            continue
        kind = (linear.weight.shape, linear.bias is not None)
        if kind not in found:
            found[kind] = _independent_from(linear)
        least_rows = found[kind]
        if least_rows is not None:
            linear.pack(least_rows=least_rows)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, num_rows - x.shape[0]))


def _independent_from(linear: Linear) -> int | None:
    """The least number of rows from which a row's result is the same for any number: 1, 2 or None.

    A single row may take another path, as it does on AVX-512 when a row is longer than 1024.
    """
    packed, in_size = _packed(linear.weight), linear.weight.shape[1]
    rows = torch.randn(max(TRIED_ROW_COUNTS), in_size, generator=torch.Generator().manual_seed(0))
    most = _multiply_packed(rows, packed, linear.bias)
    for count in TRIED_ROW_COUNTS:
        if not torch.equal(_multiply_packed(rows[:count], packed, linear.bias), most[:count]):
            return None
    single = _multiply_packed(rows[:1], packed, linear.bias)
    return 1 if torch.equal(single, most[:1]) else 2
