"""The input of a linear layer, and its epilogue."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from headway.kernels.types._deferred_norm import DeferredNorm

# "silu": x * sigmoid(x). "gelu_tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
GateActivation = Literal["silu", "gelu_tanh"]


class Activation(NamedTuple):
    """The input of a linear layer, in the weight's dtype, or in float8_e4m3fn as multiples of a
    Float8Weight's step.

    deferred: the rest of the preceding norm, by which the product must still be multiplied; None: the norm is
    complete.
    """

    values: torch.Tensor  # [rows, in]
    deferred: DeferredNorm | None = None


class NextNorm(NamedTuple):
    """The RMSNorm after a residual addition. unit_offset: it multiplies by 1 + weight."""

    weight: torch.Tensor  # [out] float
    epsilon: float
    unit_offset: bool = False


class Epilogue(NamedTuple):
    """The operations that follow a product, in this order.

    gate: the activation of the first half of the outputs, which then multiplies the second half. next_norm:
    the residual is updated in place, and the result is the updated residual times the norm's weight; the rest
    of the norm is deferred.
    """

    bias: torch.Tensor | None = None  # [out] float
    gate: GateActivation | None = None
    residual: torch.Tensor | None = None  # [rows, out] float
    next_norm: NextNorm | None = None


PLAIN = Epilogue()
