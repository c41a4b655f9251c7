"""Prefills of few sizes, alone and beside rounds, kernel by kernel: on a CPU, and beside the graphs of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.execution.graphs import Mixed, Round, padded_round, row_counts, smallest_mixed
from headway.engine.execution.padded_prefill import Prefill, packed_chunks, smallest_prefill
from headway.engine.execution.runner import Runner
from headway.engine.execution.step import Outcome
from headway.engine.scheduling.plan import PrefillChunk


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
    """What graphs of rounds with prompts replay, launched."""

    def __init__(self, runner: Runner, token_counts: Sequence[int]) -> None:
        self._runner = runner
        self._token_counts = token_counts
        self._row_counts = row_counts(len(runner.slots.limits))
        self.launched: list[Mixed] = []

    def run(
        self, wanted: Round, chunks: Sequence[PrefillChunk], *, fills_drafts: bool
    ) -> tuple[Outcome, bool] | None:
        padded = padded_round(wanted, self._row_counts)
        mixed = smallest_mixed(padded, chunks, self._token_counts, fills_drafts=fills_drafts)
        if mixed is None:
            return None
        self.launched.append(mixed)
        packed = torch.tensor(packed_chunks(chunks, mixed.num_tokens), device=self._runner.device)
        return self._runner._launch_mixed_round(packed, mixed), False
