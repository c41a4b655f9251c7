"""The input of a linear layer, and what is computed with its product."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from headway.kernels.types._deferred_norm import DeferredNorm


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

    activation: "gated_mul" is silu of the first half of the outputs times the second half. next_norm: the sum
    with the residual, which is changed in place, is multiplied by the norm's weight; the rest is deferred.
    """

    bias: torch.Tensor | None = None  # [out] float
    activation: Literal["none", "gated_mul"] = "none"
    residual: torch.Tensor | None = None  # [rows, out] float
    next_norm: NextNorm | None = None


PLAIN = Epilogue()
