"""Picks tokens for rows of the slot table; the rule itself is the kernel `sample`."""

from __future__ import annotations

import torch

from headway.engine.slots import SlotTable
from headway.kernels import sample


def pick_tokens(logits: torch.Tensor, rows: SlotTable, positions: torch.Tensor) -> torch.Tensor:
    """The tokens at positions + 0, 1, .. of each row, a function of logits, parameters, seed and position only.

    logits: [rows, window, vocab]; positions: [rows] int64, of the token picked at window place 0.
    Returns [rows, window] int64.
    """
    return sample(logits, positions, rows.temperatures, rows.top_k, rows.top_p, rows.min_p, rows.seeds)
