"""Describes what a layer computes and reads for a token. The layers fill it in themselves, so that no other
module knows their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of a layer, of which each token uses num_chosen. expert_bytes: the bytes of one expert's
    weights."""

    num_experts: int
    num_chosen: int
    expert_bytes: int

    def expected_bytes(self, num_tokens: float) -> float:
        """Returns the expected bytes of the experts that this many tokens use, each expert once, if all
        choices are equally likely and independent: E (1 - (1 - k / E)^N) of E experts, k of them for each
        token."""
        unmet: float = (1.0 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - unmet) * self.expert_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """The products of one token with weights.

    active_weights: the weights that multiply a token, fewer than all if it uses only some experts.
    active_bytes: their bytes, which a pass reads at least. activations: the numbers that a token holds at
    once besides the residual stream. routed: the experts of each layer that has some.
    """

    active_weights: int
    active_bytes: int
    activations: int = 0
    routed: tuple[RoutedExperts, ...] = ()

    @classmethod
    def of(cls, linears: Iterable[Linear], activations: int = 0) -> Work:
        """Returns the work of layers that all multiply every token."""
        layers = tuple(linears)
        weights = sum(linear.num_weights for linear in layers)
        return cls(weights, sum(linear.nbytes for linear in layers), activations)

    @classmethod
    def in_turn(cls, parts: Iterable[Work]) -> Work:
        """Returns the work of one part after the other."""
        works = tuple(parts)
        return cls(
            sum(work.active_weights for work in works),
            sum(work.active_bytes for work in works),
            max((work.activations for work in works), default=0),
            tuple(routed for work in works for routed in work.routed),
        )

    def further_expert_bytes(self, num_tokens: float) -> float:
        """Returns the bytes that a pass over this many tokens is expected to read of experts, beyond those of
        one token."""
        return sum(
            routed.expected_bytes(num_tokens) - routed.num_chosen * routed.expert_bytes
            for routed in self.routed
        )
