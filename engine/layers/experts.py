"""A mixture of experts: a router, the experts that it chooses for each token, and a shared expert if there is
one.

A token's result depends on no other token, not even in its last bit: its logits are those of a Linear, and
its experts' results are added in the order of its choices, the shared expert's last.
"""

from __future__ import annotations

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import RoutedExperts, Work
from headway.engine.models.spec import ExpertsSpec
from headway.engine.protocol.errors import ModelError
from headway.kernels import (
    ExpertMatrix,
    ExpertRule,
    ExpertWeights,
    choose_experts,
    expert_results,
    sum_experts,
    tokens_of_each_kernel,
)


class Experts:
    """The weights of all experts are two tensors, whose last entry is the shared expert: its size is that of
    the others. The logit of the shared expert's gate is one more output of the router. Immutable but for the
    weight format of the router."""

    input = None  # the router and the experts read the norm of the stream

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement) -> None:
        if place.group.size > 1:
            raise ModelError("mixtures of experts are computed by one rank; serve such a model on one device")
        self._spec = spec
        outputs = {"feed_forward.router": spec.num_experts}
        if spec.has_shared_expert:
            outputs["feed_forward.shared_gate"] = 1
        self._router = place.linear(outputs, hidden_size)
        self._rule = ExpertRule(spec.top_k, spec.normalises, spec.has_shared_expert)
        count, inner = sum(outputs.values()), spec.intermediate_size
        self._gate_up = place.empty(count, 2 * inner, hidden_size)
        self._down = place.empty(count, hidden_size, inner)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See DecoderLayer."""
        gate_up, down, count = self._gate_up, self._down, self._spec.num_experts
        own = {"feed_forward.experts.gate_up": gate_up[:count], "feed_forward.experts.down": down[:count]}
        if self._spec.has_shared_expert:
            gate, up = gate_up[count].chunk(2)
            own["feed_forward.shared.gate.weight"], own["feed_forward.shared.up.weight"] = gate, up
            own["feed_forward.shared.down.weight"] = down[count]
        return self._router.tensors() | own

    def linears(self) -> tuple[Linear, ...]:
        """Returns the router; the weights of experts have no other format."""
        return (self._router,)

    def work(self) -> Work:
        """See FeedForward."""
        spec, gate_up, down = self._spec, self._gate_up[0], self._down[0]
        num_weights, nbytes = gate_up.numel() + down.numel(), gate_up.nbytes + down.nbytes
        num_met = spec.top_k + spec.has_shared_expert
        # Of each expert that a token meets: the product of gates and up, and the result.
        activations = self._router.shape[0] + num_met * (spec.intermediate_size + len(down))
        return Work(
            self._router.num_weights + num_met * num_weights,
            self._router.nbytes + num_met * nbytes,
            activations,
            (RoutedExperts(spec.num_experts, spec.top_k, nbytes),),
        )

    def __call__(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        post_norm: RMSNorm | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """See FeedForward."""
        x = stream.normed(norm).values
        choice = choose_experts(self._router(x), self._rule, slot_mapping)
        results = expert_results(x, choice, self._weights(), self._spec.activation)
        if post_norm is None:
            stream.add_shares(results, choice.weights)
        else:
            stream.add_computed(post_norm(sum_experts(results, choice.weights)))

    def compile(self, most_tokens: int) -> None:
        """Compiles the kernels that the number of tokens chooses, up to that number, by computing zeros."""
        weights = self._weights()
        for tokens in tokens_of_each_kernel(
            self._router.zeros(1), weights, self._rule.num_slots, most_tokens
        ):
            x = self._router.zeros(tokens)
            expert_results(x, choose_experts(self._router(x), self._rule), weights, self._spec.activation)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(ExpertMatrix(self._gate_up), ExpertMatrix(self._down))
