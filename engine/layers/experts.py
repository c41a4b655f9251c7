"""A mixture of experts: a router, the experts that it chooses for each token, and a shared expert if there is
one.

A token's result does not depend on other tokens, not even in its last bit: its logits are those of a Linear,
and its experts' results are added in the order of its choices, the shared expert's last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Literal

import torch

from headway.engine.layers.group import ALONE
from headway.engine.layers.linear import ROUTER, Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import RoutedExperts, Work
from headway.engine.models.spec import ExpertsSpec
from headway.engine.protocol.config import CpuWeights
from headway.kernels import (
    ExpertMatrix,
    ExpertRule,
    ExpertWeights,
    IntegerCpuExperts,
    can_be_integers,
    choose_experts,
    expert_results,
    integer_cpu_bytes,
    integer_cpu_expert_weights,
    sum_experts,
    tokens_of_each_kernel,
)

BITS: Mapping[CpuWeights, Literal[4, 8]] = {"int4": 4, "int8": 8}


class Experts:
    """The weights of all experts are two tensors, whose last entry is the shared expert, of the same size as
    the others. The logit of the shared expert's gate is one more output of the router. Each of several ranks
    has its share of the outputs of every expert, and the whole router. Mutable: loading changes the format of
    the weights by `store`, and that of the router."""

    input = None  # the router and the experts read the norm of the stream

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement) -> None:
        self._spec, self._group = spec, place.group
        outputs = {ROUTER: spec.num_experts}
        if spec.has_shared_expert:
            outputs["feed_forward.shared_gate"] = 1
        self._router = replace(place, group=ALONE).linear(outputs, hidden_size)
        self._rule = ExpertRule(spec.top_k, spec.normalises, spec.has_shared_expert)
        count, inner = sum(outputs.values()), spec.intermediate_size
        own_inner = place.share(inner, "outputs of each expert's gate")
        own_hidden = place.share(hidden_size, "outputs of each expert")
        gate_up = place.empty_weight(count, 2 * own_inner, hidden_size)
        down = place.empty_weight(count, own_hidden, inner)
        self.weights = ExpertWeights(ExpertMatrix(gate_up), ExpertMatrix(down))

    def store(self, weights: ExpertWeights) -> None:
        """Replaces the weights by which the layer multiplies."""
        self.weights = weights

    def finish(self, cpu_weights: CpuWeights) -> None:
        """Converts dense weights to their format on a CPU, as `Linear.finish` does."""
        if cpu_weights != "full":
            self.store(ExpertWeights(*(_few_bits(matrix, cpu_weights) for matrix in self.weights)))

    def saved_bytes(self, cpu_weights: CpuWeights) -> int:
        """Returns the bytes that `finish` frees."""
        if cpu_weights == "full":
            return 0
        bits = BITS[cpu_weights]
        return sum(
            matrix.nbytes - matrix.shape[0] * integer_cpu_bytes(matrix.shape[1:], bits=bits)
            for matrix in self.weights
        )

    @property
    def is_quantized(self) -> bool:
        """Returns whether a weight is quantised."""
        return any(matrix.dense is None for matrix in self.weights)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weights in their formats."""
        return sum(matrix.nbytes for matrix in self.weights)

    @property
    def own_bytes(self) -> int:
        return self.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """See DecoderLayer. Quantised weights have none."""
        count, own = self._spec.num_experts, self._router.tensors()
        gate_up, down = (matrix.dense for matrix in self.weights)
        if gate_up is not None:
            own["feed_forward.experts.gate_up"] = gate_up[:count]
            if self._spec.has_shared_expert:
                gate, up = gate_up[count].chunk(2)
                own["feed_forward.shared.gate.weight"], own["feed_forward.shared.up.weight"] = gate, up
        if down is not None:
            own["feed_forward.experts.down"] = down[:count]
            if self._spec.has_shared_expert:
                own["feed_forward.shared.down.weight"] = down[count]
        return own

    def linears(self) -> tuple[Linear, ...]:
        """Returns the router."""
        return (self._router,)

    def work(self) -> Work:
        spec, (gate_up, down) = self._spec, self.weights
        count, hidden, inner = down.shape
        num_weights, num_met = prod(gate_up.shape[1:]) + hidden * inner, spec.top_k + spec.has_shared_expert
        nbytes = self.nbytes // count
        # Each expert that a token meets has the product of gate and up, and its result.
        activations = self._router.shape[0] + num_met * (inner + hidden)
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
        x = stream.normed(norm).values
        choice = choose_experts(self._router(x), self._rule, slot_mapping)
        gather = self._group.gather
        results = expert_results(x, choice, self.weights, self._spec.activation, gather=gather)
        if post_norm is None and self._group.size == 1:
            stream.add_shares(results, choice.weights)
            return
        total = gather(sum_experts(results, choice.weights))
        stream.add_computed(total if post_norm is None else post_norm(total))

    def compile(self, most_tokens: int) -> None:
        weights, num_ranks = self.weights, self._group.size
        for tokens in tokens_of_each_kernel(
            self._router.zeros(1), weights, self._rule.num_slots, most_tokens
        ):
            x = self._router.zeros(tokens)
            choice = choose_experts(self._router(x), self._rule)
            expert_results(
                x, choice, weights, self._spec.activation, gather=lambda inner: inner.repeat(1, num_ranks)
            )


def _few_bits(
    matrix: ExpertMatrix | IntegerCpuExperts, cpu_weights: CpuWeights
) -> ExpertMatrix | IntegerCpuExperts:
    if matrix.dense is None or not can_be_integers(matrix.dense):
        return matrix
    return integer_cpu_expert_weights(matrix.dense, bits=BITS[cpu_weights])


def compile_experts(layers: Iterable[Experts], most_tokens: int) -> None:
    """Compiles the kernels that the number of tokens chooses, up to that number, by computing zeros: once for
    all layers of the same formats."""
    by_format = {tuple(matrix.bits for matrix in layer.weights): layer for layer in layers}
    for layer in by_format.values():
        layer.compile(most_tokens)
