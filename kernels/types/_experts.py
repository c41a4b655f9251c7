"""The value types of a mixture of experts (MoE): the routing rule, its result, and the experts' weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.types._weights import IntegerCpuWeight

GROUP = 128  # inputs that share the scale of an output
# The bits of a float8 code, at the boundary of exponent and mantissa of bfloat16, are the code's value
# divided by FLOAT8_SCALE, so that its scale is stored times FLOAT8_SCALE. Integers are put into the mantissa
# of CODE_SHIFT.
FLOAT8_SCALE, CODE_SHIFT = 2.0**120, 128.0


class ExpertRule(NamedTuple):
    """The routing rule: a token chooses the top_k experts of the softmax over all of them; of equal ones the
    lower id wins.

    normalises: the weights of the chosen experts are divided by their sum. has_shared: every token also
    chooses a shared expert, the last, in its last slot; its weight is the sigmoid of the last logit.
    """

    top_k: int
    normalises: bool = True
    has_shared: bool = False

    @property
    def num_slots(self) -> int:
        """Returns the number of experts of a token."""
        return self.top_k + self.has_shared


class ExpertChoice(NamedTuple):
    """The experts of each token, in the order in which their results are added."""

    ids: torch.Tensor  # [tokens, slots] int32; -1: the token is padding
    weights: torch.Tensor  # [tokens, slots] float32, values of the logits' dtype


class ExpertMatrix(NamedTuple):
    """The weights of one product for all experts: unquantised, or codes of `pack_expert` for bfloat16 values.

    factors: for each output and 128 inputs the bits of the scale in bfloat16 in the low half (for float8
    codes times 2 ** 120), and for integer codes those of -(128 + zero point) in the high half.
    """

    values: torch.Tensor  # [experts, outputs, inputs] float, or [experts, outputs, inputs * bits / 16] int16
    factors: torch.Tensor | None = None  # [experts, inputs / 128, outputs] int32
    bits: int = 16  # of a weight; 8: float8_e4m3fn, 4: integers from 0 to 15, else unquantised

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (experts, outputs, inputs)."""
        experts, outputs, stored = self.values.shape
        return experts, outputs, stored * 16 // self.bits

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.factors is None else self.factors.nbytes)

    @property
    def dense(self) -> torch.Tensor | None:
        """Returns the unquantised weights, [experts, outputs, inputs]; None for codes."""
        return self.values if self.factors is None else None


class IntegerCpuExperts(NamedTuple):
    """The weights of one product for all experts, for `integer_cpu_linear`."""

    experts: tuple[IntegerCpuWeight, ...]  # of one shape and number of bits

    @property
    def dense(self) -> None:
        """Returns None: see ExpertMatrix."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (experts, outputs, inputs)."""
        return len(self.experts), self.experts[0].num_outputs, self.experts[0].num_inputs

    @property
    def nbytes(self) -> int:
        return sum(weight.tiles.nbytes for weight in self.experts)

    @property
    def bits(self) -> int:
        return self.experts[0].bits


class ExpertWeights(NamedTuple):
    """The weights of all experts of a feed-forward. gate_up: [experts, 2 * inner, hidden], for each expert
    its gate, then its up; down: [experts, hidden, inner]."""

    gate_up: ExpertMatrix | IntegerCpuExperts
    down: ExpertMatrix | IntegerCpuExperts


class PairBlocks(NamedTuple):
    """The pairs of a token and a slot, sorted by their experts and cut into blocks of one expert each. A
    pair's number is token * slots + slot. Pairs without an expert are in no block."""

    order: torch.Tensor  # [pairs] int32: the pairs of the first block, then those of the next
    experts: torch.Tensor  # [blocks] int32; -1: the block is empty, as are all after it
    starts: torch.Tensor  # [blocks] int32: where the block begins in `order`
    ends: torch.Tensor  # [blocks] int32: where it ends
