"""A root-mean-square norm: alone, after a residual addition, and of embedded tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headway.engine.layers.placement import Placement
from headway.engine.models.spec import NormSpec
from headway.kernels import add_rms_norm, embed_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight: [hidden]. If a step is given, results are float8_e4m3fn in multiples of it."""

    weight: torch.Tensor
    spec: NormSpec

    @classmethod
    def empty(cls, hidden_size: int, spec: NormSpec, place: Placement) -> RMSNorm:
        """Returns a norm whose weight is not initialised."""
        return cls(place.empty(hidden_size), spec)

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, hidden]
        step: torch.Tensor | None = None,  # [1] float32
        *,
        out: torch.Tensor | None = None,  # [tokens, hidden]
    ) -> torch.Tensor:  # [tokens, hidden]
        epsilon, unit_offset = self.spec.epsilon, self.spec.unit_offset
        return rms_norm(x, self.weight, epsilon, unit_offset=unit_offset, step=step, out=out)

    def of_sum(
        self,
        delta: torch.Tensor,  # [tokens, hidden], or [tokens * slots, hidden] with shares
        residual: torch.Tensor,  # [tokens, hidden], in place: += delta
        step: torch.Tensor | None = None,  # [1] float32
        shares: torch.Tensor | None = None,  # [tokens, slots] float32
    ) -> torch.Tensor:  # [tokens, hidden]
        """Returns the norm of the new residual. shares: see `add_rms_norm`."""
        epsilon, unit_offset = self.spec.epsilon, self.spec.unit_offset
        return add_rms_norm(
            delta, residual, self.weight, epsilon, unit_offset=unit_offset, step=step, shares=shares
        )

    def embedded(
        self,
        token_ids: torch.Tensor,  # [tokens] int64
        embedding: torch.Tensor,  # [vocab, hidden]
        step: torch.Tensor | None = None,  # [1] float32
        *,
        scale: float,
        out: torch.Tensor | None = None,  # [tokens, hidden]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the embedded tokens times the scale and their norm, [tokens, hidden] each."""
        epsilon, unit_offset = self.spec.epsilon, self.spec.unit_offset
        return embed_rms_norm(
            token_ids,
            embedding,
            self.weight,
            epsilon,
            scale=scale,
            unit_offset=unit_offset,
            step=step,
            out=out,
        )

    def largest(self) -> float:
        """Returns an upper bound of the magnitude of results, apart from rounding: the normed vector, before
        the weight, is no longer than a vector of ones."""
        factor = self.weight + 1 if self.spec.unit_offset else self.weight
        return factor.abs().max().item() * math.sqrt(len(factor))


def normed_side_by_side(
    hidden: torch.Tensor,  # [tokens, hidden]
    token_ids: torch.Tensor,  # [tokens] int64
    embedding: torch.Tensor,  # [vocab, hidden]
    *,
    hidden_norm: RMSNorm,
    token_norm: RMSNorm,
    step: torch.Tensor | None,  # [1] float32: as of RMSNorm
    embedding_scale: float = 1.0,
    hidden_first: bool = False,
) -> torch.Tensor:
    """Returns the norms of the hidden states and of the embedded tokens side by side, [tokens, 2 * hidden]:
    the input of draft layers."""
    dtype = hidden.dtype if step is None else torch.float8_e4m3fn
    both = hidden.new_empty(len(hidden), 2 * hidden.shape[1], dtype=dtype)
    first, second = both.chunk(2, dim=1)
    normed_hidden, normed_token = (first, second) if hidden_first else (second, first)
    hidden_norm(hidden, step, out=normed_hidden)
    token_norm.embedded(token_ids, embedding, step, scale=embedding_scale, out=normed_token)
    return both
