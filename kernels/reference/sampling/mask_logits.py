"""Forbids the tokens that a grammar does not allow, at each place of a window (PyTorch twin)."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

# [256, 8] float32: for each byte what is added to the logits of its eight tokens, that of the lowest bit
# first.
_ADDED = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 0, -torch.inf, 0.0)


def mask_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float; changed in place
    lines: torch.Tensor,  # [rows] int64: the row's entry of `allowed`; -1: everything is allowed
    allowed: torch.Tensor,  # [n, window or more, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i
) -> None:
    """Sets the logits of forbidden tokens to -inf; where one is NaN or +inf it stays, or becomes, one of
    these, which `sample` looks for. For little-endian machines. Addition is the one operation here that a CPU
    does at the speed of its memory."""
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
