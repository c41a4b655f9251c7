"""Reads memory from end to end with nearly no computation (PyTorch twin)."""

from __future__ import annotations

import torch


def stream_read(
    data: torch.Tensor,  # [n] int32, n >= 1
) -> torch.Tensor:
    """Returns the greatest number, [] int32."""
    return data.amax()
