"""A gated feed-forward: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.placement import Placement
from headway.engine.models.spec import DenseSpec
from headway.kernels import Activation


class GatedMlp:
    """The projections of gate and up are one product. Immutable but for the weight formats of its Linear layers."""

    def __init__(self, spec: DenseSpec, hidden_size: int, place: Placement) -> None:
        inner, has_bias = spec.intermediate_size, spec.has_bias
        self._inner = inner
        self.input = Linear(place.empty(2 * inner, hidden_size), place.empty(2 * inner) if has_bias else None)
        self.output = Linear(place.empty(hidden_size, inner), place.empty(hidden_size) if has_bias else None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See DecoderLayer."""
        gate_up = {"feed_forward.gate": self._inner, "feed_forward.up": self._inner}
        return self.input.parts(gate_up) | self.output.parts({"feed_forward.down": self.output.num_outputs})

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def __call__(self, x: Activation) -> torch.Tensor:
        """x: [tokens, hidden], normed. Returns [tokens, intermediate_size], which `output` is to multiply."""
        return self.input.gated(x)
