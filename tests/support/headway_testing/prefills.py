"""Prefills of few sizes, kernel by kernel: on a CPU, and beside the graphs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.batch import PrefillChunk
from headway.engine.padded_prefill import packed_chunks
from headway.engine.runner import Runner


class PaddedPrefills:
    """What graphs of prefills replay, launched: chunks among padding."""

    def __init__(self, runner: Runner, token_counts: Sequence[int]) -> None:
        self._runner = runner
        self._token_counts = token_counts
        self.sizes: list[int] = []

    def run(self, chunks: Sequence[PrefillChunk], *, fills_drafts: bool) -> torch.Tensor | None:
        needed = sum(len(chunk.token_ids) for chunk in chunks)
        if needed > self._token_counts[-1]:
            return None
        num_tokens = next(n for n in self._token_counts if n >= needed)
        self.sizes.append(num_tokens)
        packed = torch.tensor(packed_chunks(chunks, num_tokens), device=self._runner.device)
        return self._runner._launch_padded_prefill(packed, fills_drafts)
