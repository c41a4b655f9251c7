"""The input of a linear layer, and what is computed with its product."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from headway.kernels.types._deferred_norm import DeferredNorm

# "silu": x * sigmoid(x). "gelu_tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
GateActivation = Literal["silu", "gelu_tanh"]


class Activation(NamedTuple):
    """The input of a linear layer: in the weight's dtype, or in float8_e4m3fn as multiples of a
    Float8Weight's step.

    deferred: what the product is still to be multiplied by, where the norm before it was applied but for
    that.
    """

    values: torch.Tensor  # [rows, in]
    deferred: DeferredNorm | None = None


class NextNorm(NamedTuple):
    """The root-mean-square norm after a residual addition. unit_offset: it multiplies by 1 + weight."""

    weight: torch.Tensor  # [out] float
    epsilon: float
    unit_offset: bool = False


class Epilogue(NamedTuple):
    """The operations that are computed with a product, in this order.

    gate: the function of the first half of the outputs that multiplies the second half, if there is one.
    next_norm: the sum with the residual, which is changed in place, is multiplied by the norm's weight; the
    rest is deferred.
    """

    bias: torch.Tensor | None = None  # [out] float
    gate: GateActivation | None = None
    residual: torch.Tensor | None = None  # [rows, out] float
    next_norm: NextNorm | None = None


PLAIN = Epilogue()
