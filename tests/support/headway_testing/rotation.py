"""Rotary position embedding as a product of complex numbers in float64."""

from __future__ import annotations

import torch


def turned(heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Returns heads [tokens, num_heads, head_dim] with their first rotary_dim dimensions turned, as float64.

    cos_sin: [max_position, rotary_dim], cosines, then sines. Dimension i turns with i + rotary_dim / 2.
    """
    rotary_dim = cos_sin.shape[1]
    first, second = heads[..., :rotary_dim].double().chunk(2, -1)
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
    result = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat((result.real, result.imag, heads[..., rotary_dim:].double()), -1)
