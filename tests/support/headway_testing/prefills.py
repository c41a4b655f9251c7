"""Prefills of few sizes, alone and beside rounds, kernel by kernel: on a CPU, and beside the graphs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.batch import PrefillChunk
from headway.engine.graphs import Mixed, Round
from headway.engine.padded_prefill import Prefill, is_near, packed_chunks, padded_count, smallest_prefill
from headway.engine.round import Outcome
from headway.engine.runner import Runner


class PaddedPrefills:
    """What graphs of prefills replay, launched: chunks among padding."""

    def __init__(self, runner: Runner, token_counts: Sequence[int]) -> None:
        self._runner = runner
        self._token_counts = token_counts
        self.launched: list[Prefill] = []

    def run(self, chunks: Sequence[PrefillChunk], *, fills_drafts: bool) -> torch.Tensor | None:
        wanted = smallest_prefill(chunks, self._token_counts, fills_drafts=fills_drafts)
        if wanted is None:
            return None
        self.launched.append(wanted)
        packed = torch.tensor(packed_chunks(chunks, wanted.num_tokens), device=self._runner.device)
        return self._runner._launch_padded_prefill(packed, wanted)


class MixedLaunches:
    """What graphs of rounds with prompts replay, launched. row_counts: to which rounds are padded; (): to none."""

    def __init__(self, runner: Runner, token_counts: Sequence[int], row_counts: Sequence[int] = ()) -> None:
        self._runner = runner
        self._token_counts = token_counts
        self._row_counts = row_counts
        self.launched: list[Mixed] = []

    def run(
        self, wanted: Round, chunks: Sequence[PrefillChunk], *, fills_drafts: bool
    ) -> tuple[Outcome, bool] | None:
        num_tokens = padded_count(chunks, self._token_counts)
        if num_tokens is None or not is_near(chunks):
            return None
        num_rows = next((n for n in self._row_counts if n >= wanted.num_rows), wanted.num_rows)
        mixed = Mixed(wanted._replace(num_rows=num_rows), num_tokens, fills_drafts)
        self.launched.append(mixed)
        packed = torch.tensor(packed_chunks(chunks, num_tokens), device=self._runner.device)
        return self._runner._launch_mixed_round(packed, mixed), False
