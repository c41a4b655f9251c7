"""A gated feed-forward: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import Work
from headway.engine.models.spec import DenseSpec


class GatedMlp:
    """The projections of gate and up are one product. Immutable but for the weight formats of its Linear
    layers."""

    def __init__(self, spec: DenseSpec, hidden_size: int, place: Placement) -> None:
        self._activation = spec.activation
        inner, has_bias = spec.intermediate_size, spec.has_bias
        gate_up = {"feed_forward.gate": inner, "feed_forward.up": inner}
        self.input = place.linear(gate_up, hidden_size, has_bias=has_bias, is_gate=True)
        self.output = place.linear({"feed_forward.down": hidden_size}, inner, has_bias=has_bias)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.input.tensors() | self.output.tensors()

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def work(self) -> Work:
        return Work.of(self.linears(), self.input.shape[0] + self.output.shape[1])

    def __call__(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        post_norm: RMSNorm | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        gated = self.input.gated(stream.normed(norm, self.input), self._activation)
        stream.add(gated, self.output, post_norm)
