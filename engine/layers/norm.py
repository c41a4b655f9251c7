"""Root-mean-square norms by their NormSpec: alone, after a residual addition, and of embedded tokens."""

from __future__ import annotations

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


def normed_sum(
    delta: torch.Tensor | None,  # [tokens, hidden]
    residual: torch.Tensor,  # [tokens, hidden], in place: += delta
    weight: torch.Tensor,  # [hidden]
    norm: NormSpec,
    step: torch.Tensor | None = None,  # [1] float32
) -> torch.Tensor:  # [tokens, hidden]
    """Returns the norm of the new residual; with a step in float8."""
    if delta is None:
        return normed(residual, weight, norm, step)
    return add_rms_norm(delta, residual, weight, norm.epsilon, unit_offset=norm.unit_offset, step=step)


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
