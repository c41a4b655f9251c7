"""Root-mean-square norms by their NormSpec: alone, after a residual addition, and of embedded tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.models.spec import NormSpec
from headway.kernels import add_rms_norm, embed_rms_norm, rms_norm


def normed(
    x: torch.Tensor,  # [tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    norm: NormSpec,
    step: torch.Tensor | None = None,  # [1] float32
    *,
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> torch.Tensor:  # [tokens, hidden]
    """Returns the norm of x; with a step in float8."""
    return rms_norm(x, weight, norm.epsilon, unit_offset=norm.unit_offset, step=step, out=out)


def embed_normed(
    token_ids: torch.Tensor,  # [tokens] int64
    embedding: torch.Tensor,  # [vocab, hidden]
    weight: torch.Tensor,  # [hidden]
    norm: NormSpec,
    step: torch.Tensor | None = None,  # [1] float32
    *,
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the embedded tokens and their norm, [tokens, hidden] each; the norm with a step in float8."""
    return embed_rms_norm(
        token_ids, embedding, weight, norm.epsilon, unit_offset=norm.unit_offset, step=step, out=out
    )


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """A norm of the residual stream. weight: [hidden]. Results are float8_e4m3fn where a step is given."""

    weight: torch.Tensor
    spec: NormSpec

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, hidden]
        step: torch.Tensor | None = None,  # [1] float32
    ) -> torch.Tensor:  # [tokens, hidden]
        return normed(x, self.weight, self.spec, step)

    def of_sum(
        self,
        delta: torch.Tensor,  # [tokens, hidden]
        residual: torch.Tensor,  # [tokens, hidden], in place: += delta
        step: torch.Tensor | None = None,  # [1] float32
    ) -> torch.Tensor:  # [tokens, hidden]
        """Returns the norm of the new residual."""
        epsilon, unit_offset = self.spec.epsilon, self.spec.unit_offset
        return add_rms_norm(delta, residual, self.weight, epsilon, unit_offset=unit_offset, step=step)

    def embedded(
        self,
        token_ids: torch.Tensor,  # [tokens] int64
        embedding: torch.Tensor,  # [vocab, hidden]
        step: torch.Tensor | None = None,  # [1] float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the embedded tokens and their norm, [tokens, hidden] each."""
        return embed_normed(token_ids, embedding, self.weight, self.spec, step)
