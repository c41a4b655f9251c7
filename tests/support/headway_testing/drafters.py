"""Drafters that are always right, always wrong, or right by chance: none of them may change a text."""

from __future__ import annotations

import torch

from headway.engine.speculation.drafter import NoDrafter
from headway.engine.state.row_tensors import RowTensors


class Knowing(NoDrafter):
    """Drafts what the request with this seed will say, moved by `shift`: 0 is always right, else always
    wrong."""

    def __init__(self, texts: dict[int, list[int]], vocab_size: int, *, shift: int) -> None:
        # The last row and the last column are zeros, for other seeds and after a text's end.
        longest = max((len(text) for text in texts.values()), default=0)
        self._texts = torch.zeros((max(texts, default=-1) + 2, longest + 1), dtype=torch.int64)
        for seed, text in texts.items():
            self._texts[seed, : len(text)] = torch.tensor(text, dtype=torch.int64)
        self._vocab_size, self._shift = vocab_size, shift

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Does not wait for the GPU, so that a graph can hold it once a step was launched kernel by
        kernel."""
        self._texts = self._texts.to(rows.seeds.device)
        last_seed, last_place = (size - 1 for size in self._texts.shape)
        is_known = (rows.seeds >= 0) & (rows.seeds < last_seed)
        seeds = torch.where(is_known, rows.seeds, last_seed)
        places = rows.kv_lengths[:, None] + 1 + torch.arange(depth, device=rows.seeds.device)
        drafts = self._texts[seeds[:, None], places.clamp(0, last_place)]
        return (drafts + self._shift) % self._vocab_size


class Guessing(NoDrafter):
    """Drafts random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(rows.kv_lengths.sum()))
        return torch.randint(self._vocab_size, (len(rows.seeds), depth), generator=generator)
