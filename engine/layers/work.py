"""What a layer computes and reads for a token, told by the layers themselves, so that nobody else knows their
shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Work:
    """The products of one token with weights.

    active_weights: those that multiply a token, fewer than all where it meets only some experts.
    active_bytes: their bytes, which a pass reads at least. activations: numbers that a token holds at once
    beside the residual stream.
    """

    active_weights: int
    active_bytes: int
    activations: int = 0

    @classmethod
    def of(cls, linears: Iterable[Linear], activations: int = 0) -> Work:
        """Returns the work of layers that multiply every token."""
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
        )
