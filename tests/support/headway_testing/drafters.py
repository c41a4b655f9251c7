"""Drafters that are always right, always wrong, or right by chance: none of them may change a text."""

from __future__ import annotations

import torch

from headway.engine.speculation.drafter import NoDrafter
from headway.engine.state.row_tensors import RowTensors


class Knowing(NoDrafter):
    """Drafts what the request with this seed will say, moved by `shift`: 0 is always right, else always wrong."""

    def __init__(self, texts: dict[int, list[int]], vocab_size: int, *, shift: int) -> None:
        self._texts, self._vocab_size = texts, vocab_size
        self._shift = shift

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        drafts = torch.zeros((len(rows.seeds), depth), dtype=torch.int64)
        for row, (seed, length) in enumerate(zip(rows.seeds.tolist(), rows.kv_lengths.tolist(), strict=True)):
            known = self._texts.get(seed, [])[length + 1 : length + 1 + depth]
            drafts[row, : len(known)] = torch.tensor(known, dtype=torch.int64)
        return (drafts + self._shift) % self._vocab_size


class Guessing(NoDrafter):
    """Drafts random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(rows.kv_lengths.sum()))
        return torch.randint(self._vocab_size, (len(rows.seeds), depth), generator=generator)
