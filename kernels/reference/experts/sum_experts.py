"""The sum of the results of a token's experts (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import wide


def sum_experts(
    results: torch.Tensor,  # [tokens * slots, hidden] float
    weights: torch.Tensor,  # [tokens, slots] float32
) -> torch.Tensor:
    """Returns the weighted sums, [tokens, hidden], added slot by slot in float32 and rounded once."""
    tokens, slots = weights.shape
    by_slot = wide(results).view(tokens, slots, results.shape[1])
    total = by_slot[:, 0] * weights[:, :1]
    for slot in range(1, slots):
        total = total + by_slot[:, slot] * weights[:, slot : slot + 1]
    return total.to(results.dtype)
