"""The residual stream of a forward pass. This is the only module that knows how additions and norms are fused
with products.

Layers say what they read and what they add. The stream decides, by its size and the weight formats of both
products, whether the residual addition is fused with a product, whether a norm is computed with the addition
before it or deferred to the product after it, and whether it is rounded to float8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.kernels import Activation, Epilogue, NextNorm, defers_norm, linear, sum_experts


@dataclass(frozen=True, slots=True)
class _Addition:
    """An addition to the residual stream that has yet to be computed. writer: the layer whose product with x
    is added; None: x itself is added. norm: is applied to the product, if there is one. shares: the weights
    with which several rows of x for each token are summed; None: x has one row a token."""

    x: torch.Tensor  # [tokens, this rank's share of the writer's inputs], or [tokens (* slots), hidden]
    writer: Linear | None = None
    norm: RMSNorm | None = None
    shares: torch.Tensor | None = None  # [tokens, slots] float32

    @property
    def plain_writer(self) -> Linear | None:
        """Returns the writer if its product is added as it is."""
        return self.writer if self.norm is None else None


class ResidualStream:
    """The residual stream, [tokens, hidden], which is changed in place, and at most one addition that has yet
    to be computed.

    An addition waits for the norm after it, so that one launch can compute both. Mutable: the layers of one
    forward pass are its only writers, one after the other.
    """

    def __init__(
        self,
        residual: torch.Tensor,  # [tokens, hidden], changed in place
        scale: float = 1.0,
        group: Group = ALONE,
    ) -> None:
        """scale: the factor of all that is added. group: gathers a writer's input and its product."""
        self._residual: torch.Tensor | None = residual
        self._tokens: tuple[torch.Tensor, torch.Tensor, float] | None = None
        self._scale, self._group = scale, group
        self._addition: _Addition | None = None

    @classmethod
    def of_tokens(
        cls,
        token_ids: torch.Tensor,  # [tokens] int64
        embedding: torch.Tensor,  # [vocab, hidden]
        scale: float = 1.0,
        *,
        embedding_scale: float = 1.0,
        group: Group = ALONE,
    ) -> ResidualStream:
        """Returns a stream of embedded tokens, times the embedding scale; the first norm looks them up."""
        stream = cls(embedding, scale, group)
        stream._residual, stream._tokens = None, (token_ids, embedding, embedding_scale)
        return stream

    def add(
        self,
        x: torch.Tensor,  # [tokens, this rank's share of the writer's inputs]
        writer: Linear,
        norm: RMSNorm | None = None,
    ) -> None:
        """Adds the writer's product with x, or the norm of that product, times the scale."""
        self._wait_with(_Addition(x, writer, norm))

    def add_computed(
        self,
        x: torch.Tensor,  # [tokens, hidden]
    ) -> None:
        """Adds a complete result, times the scale."""
        self._wait_with(_Addition(x))

    def add_shares(
        self,
        x: torch.Tensor,  # [tokens * slots, hidden]
        shares: torch.Tensor,  # [tokens, slots] float32
    ) -> None:
        """Adds the weighted sum of each token's rows, slot by slot and rounded once, times the scale."""
        self._wait_with(_Addition(x, shares=shares))

    def tap(self) -> torch.Tensor:
        """Returns a copy of the stream, [tokens, hidden], with all additions so far."""
        return self.sum().clone()

    def normed(self, norm: RMSNorm, reader: Linear | None = None) -> Activation:
        """Returns the norm of the stream in the best form for the reader, or in the stream's dtype without a
        reader."""
        step = None if reader is None else reader.input_step
        if self._residual is None:
            assert self._tokens is not None
            token_ids, embedding, embedding_scale = self._tokens
            self._residual, x = norm.embedded(token_ids, embedding, step, scale=embedding_scale)
            return Activation(x)
        if self._addition is None:
            return Activation(norm(self._residual, step))
        x, writer = self._addition.x, self._addition.plain_writer
        if (
            reader is not None
            and writer is not None
            and self._scale == self._group.size == 1
            and defers_norm(self._residual, writer.stored, reader.stored)
        ):
            self._addition = None
            next_norm = NextNorm(norm.weight, norm.spec.epsilon, norm.spec.unit_offset)
            epilogue = Epilogue(writer.bias, residual=self._residual, next_norm=next_norm)
            return linear(Activation(x), writer.stored, epilogue)
        if self._addition.shares is not None and self._scale == 1:
            addition, self._addition = self._addition, None
            return Activation(norm.of_sum(addition.x, self._residual, step, addition.shares))
        delta = self._added()
        return Activation(
            norm(self._residual, step) if delta is None else norm.of_sum(delta, self._residual, step)
        )

    def sum(self) -> torch.Tensor:
        """Returns the stream, [tokens, hidden], with all additions."""
        assert self._residual is not None, "no layer has read the tokens"
        delta = None if self._addition is None else self._added()
        return self._residual if delta is None else self._residual.add_(delta)

    def _wait_with(self, addition: _Addition) -> None:
        assert self._addition is None, "a norm comes between two additions"
        self._addition = addition

    def _added(self) -> torch.Tensor | None:
        """Computes the addition. Returns what still has to be added to the residual, [tokens, hidden], or
        None."""
        assert self._addition is not None
        assert self._residual is not None
        addition, self._addition = self._addition, None
        if addition.writer is None:
            x = addition.x if addition.shares is None else sum_experts(addition.x, addition.shares)
            return x if self._scale == 1 else x * self._scale
        if addition.norm is None and self._scale == self._group.size == 1:
            return addition.writer.added_to(self._residual, addition.x)
        product = self._group.gather(addition.writer(self._group.gather(addition.x)))
        if addition.norm is not None:
            product = addition.norm(product)
        return product if self._scale == 1 else product.mul_(self._scale)
