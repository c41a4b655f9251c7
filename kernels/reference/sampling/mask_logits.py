"""Forbids the tokens that a grammar does not allow, at each place of a window (PyTorch twin)."""

from __future__ import annotations

import torch


def mask_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float; changed in place
    lines: torch.Tensor,  # [rows] int64: the row's entry of `allowed`; -1: everything is allowed
    allowed: torch.Tensor,  # [n, window or more, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i
) -> None:
    """Sets the logits of forbidden tokens to -inf; NaN and +inf stay, as `sample` looks for them."""
    _, window, vocab_size = logits.shape
    if len(allowed) == 0:
        return
    words = allowed[lines.clamp(min=0), :window]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = ((words[..., None] >> shifts) & 1).flatten(2)[..., :vocab_size] == 0
    logits.masked_fill_(bits & (logits < torch.inf) & (lines >= 0).view(-1, 1, 1), -torch.inf)
