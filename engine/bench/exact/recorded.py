"""Drafts from recorded texts: a model of random weights accepts none of its own drafts, and so checks too
little."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.speculation.drafter import NoDrafter
from headway.engine.state.row_tensors import RowTensors

# One draft of WRONG_EVERY is wrong, at places that depend on text and position.
WRONG_EVERY, TEXT_STEP, POSITION_STEP = 4, 5, 7


class RecordedDrafter(NoDrafter):
    """Proposes what the text of a row's seed goes on with, three times of four. Mutable: `record` fills in
    the texts."""

    def __init__(self, num_texts: int, max_length: int, vocab_size: int, device: torch.device) -> None:
        # The last line is that of all seeds without a text.
        self._tokens = torch.zeros((num_texts + 1, max_length), dtype=torch.int64, device=device)
        self._vocab_size = vocab_size

    def record(self, texts: Sequence[Sequence[int]]) -> None:
        """texts: prompt and output of each text, by seed."""
        width = self._tokens.shape[1]
        lines = [[*text, *[0] * (width - len(text))] for text in texts]
        self._tokens[: len(lines)].copy_(torch.tensor(lines, dtype=torch.int64))

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Returns [rows, depth] int64."""
        num_texts, width = self._tokens.shape[0] - 1, self._tokens.shape[1]
        is_known = (rows.seeds >= 0) & (rows.seeds < num_texts)
        lines = torch.where(is_known, rows.seeds, num_texts)[:, None]
        places = rows.kv_lengths[:, None] + torch.arange(1, depth + 1, device=self._tokens.device)
        places = places.clamp(max=width - 1)
        known = self._tokens[lines, places]
        is_wrong = (TEXT_STEP * lines + POSITION_STEP * places) % WRONG_EVERY == 0
        return torch.where(is_wrong, (known + 1) % self._vocab_size, known)
