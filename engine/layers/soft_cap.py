"""The soft cap of logits."""

from __future__ import annotations

import torch


def soft_capped(
    logits: torch.Tensor,  # [n, vocab], overwritten
    cap: float,
) -> torch.Tensor:  # [n, vocab]
    """Returns cap * tanh(logits / cap), rounded after each operation as transformers rounds; a cap of 0
    changes nothing. Infinite logits become the cap; NaN stays."""
    return logits if cap == 0 else logits.div_(cap).tanh_().mul_(cap)
