"""RMSNorm alone, after a residual addition, or of embedded tokens (PyTorch twin).

Statistics are in float32 (float64 for float64). A plain weight multiplies values that were rounded to the
input's dtype; with `unit_offset` the factor (1 + weight) is applied before rounding. These are the orders
that the models were trained with.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.experts.sum_experts import sum_experts


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32; no result is more than 448 of it
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> torch.Tensor:
    """Returns [tokens, hidden] in x's dtype; with a step, divided by it, in float8_e4m3fn."""
    if x.dtype in (torch.float32, torch.float64):
        factor = 1 + weight if unit_offset else weight
        normed = torch.nn.functional.rms_norm(x, weight.shape, factor, epsilon)
    else:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        normed = (wide * (1 + weight.float())).to(x.dtype) if unit_offset else weight * wide.to(x.dtype)
    if step is not None:
        normed = (normed.float() / step).to(torch.float8_e4m3fn)
    if out is None:
        return normed
    assert out.dtype == normed.dtype, f"{out.dtype} is given for {normed.dtype}"
    return out.copy_(normed)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float, or [tokens * slots, hidden] with shares
    residual: torch.Tensor,  # [tokens, hidden] float, in place: += x
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32, as of `rms_norm`
    shares: torch.Tensor | None = None,  # [tokens, slots] float32
) -> torch.Tensor:
    """Adds x to the residual and returns the norm of the new residual, [tokens, hidden]. With shares the
    weighted sum of a token's slots is added, as in `sum_experts`."""
    if shares is not None:
        x = sum_experts(x, shares)
    return rms_norm(residual.add_(x), weight, epsilon, unit_offset=unit_offset, step=step)


def embed_rms_norm(
    token_ids: torch.Tensor,  # [tokens] int64, rows of the embedding
    embedding: torch.Tensor,  # [vocab, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    scale: float = 1.0,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32, as of `rms_norm`
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the embedded tokens times the scale, their norm), [tokens, hidden] each. The scale and the
    product are rounded to the embedding's dtype."""
    embedded = torch.nn.functional.embedding(token_ids, embedding)
    if scale != 1:
        embedded = embedded * torch.tensor(scale, dtype=embedding.dtype, device=embedding.device)
    return embedded, rms_norm(embedded, weight, epsilon, unit_offset=unit_offset, step=step, out=out)
