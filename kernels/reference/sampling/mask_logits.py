"""Masks the tokens that a grammar does not allow, at each position of a window (PyTorch twin)."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

# [256, 8] float32: for each byte the numbers to add to the logits of its eight tokens, the lowest bit first.
_ADDED = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 0, -torch.inf, 0.0)


def mask_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float; changed in place
    lines: torch.Tensor,  # [rows] int64: the row's entry of `allowed`; -1: everything is allowed
    allowed: torch.Tensor,  # [n, window or more, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i
) -> None:
    """Sets the logits of forbidden tokens to -inf. A logit that is NaN or +inf stays NaN or +inf, which
    `sample` detects. Requires a little-endian machine. It adds, because that is the only such operation that
    a CPU does at the speed of its memory."""
    _, window, vocab_size = logits.shape
    masked = (lines >= 0).nonzero()[:, 0]
    if len(masked) == 0:
        return
    data = allowed[lines[masked], :window].view(torch.uint8).to(torch.int64)
    added = embedding(data, _ADDED.to(logits)).flatten(2)[..., :vocab_size]
    if len(masked) == len(logits):
        logits += added
    else:
        logits.index_add_(0, masked, added)
