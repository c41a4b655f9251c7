"""Copies entries of state to other entries (PyTorch twin)."""

from __future__ import annotations

import torch


def copy_entries(
    memory: torch.Tensor,  # [layers, entries, *shape], in place
    sources: torch.Tensor,  # [n] int64: entries
    targets: torch.Tensor,  # [n] int64: entries, distinct and not among the sources
) -> None:
    """Sets memory[:, targets] = memory[:, sources]."""
    memory.index_copy_(1, targets, memory.index_select(1, sources))
