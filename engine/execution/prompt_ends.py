"""Scores prompt tokens, samples first tokens and starts decoding in rows, after a pass that computed
chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.execution.device_rows import DeviceRows
from headway.engine.execution.prefill import first_places, last_places
from headway.engine.execution.results import DeviceResults
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.sampling.sampler import NO_TOKEN, SCORED_AT_ONCE, pick_tokens, score_tokens
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.state.masks import Masks
from headway.engine.state.transfer import to_device
from headway.kernels import begin_decode


class PromptEnds:
    """Launches kernel by kernel. It has no mutable state of its own: it writes to the table and the results
    that it gets."""

    def __init__(self, model: CausalLM, table: DeviceRows, *, block_size: int) -> None:
        self._model = model
        self._table = table
        self._block_size = block_size

    def finish(
        self,
        chunks: Sequence[PrefillChunk],
        hidden: torch.Tensor,  # [tokens or more, hidden], in the order of the chunks
        results: DeviceResults,
        sampled: torch.Tensor | None = None,  # [rows] int64: what a round sampled after the prompts, by row
        masks: Masks | None = None,  # of all rows; None: no row is masked
    ) -> None:
        """Samples the tokens after last chunks, unless a round has done so, and scores the prompt tokens
        whose scores are wanted."""
        last = [chunk for chunk in chunks if chunk.is_last]
        if last:
            of_last = hidden[self._to_device(last_places(chunks))]
            if sampled is not None and any(chunk.row >= len(sampled) for chunk in last):
                sampled = None
            self.start_rows(last, of_last, results, sampled, masks)
        if any(chunk.scored_token_ids for chunk in chunks):
            results.prompt_logprobs = [
                self._score_prompt(chunk, hidden[first:])
                for chunk, first in zip(chunks, first_places(chunks), strict=True)
            ]

    def start_rows(
        self,
        chunks: Sequence[PrefillChunk],
        hidden: torch.Tensor,  # [chunks, hidden], of the last prompt tokens
        results: DeviceResults,
        sampled: torch.Tensor | None,  # [rows] int64, by row; None: sampled here
        masks: Masks | None,
    ) -> None:
        """Starts decoding in rows whose prompts are in the cache."""
        table = self._table
        lengths = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        index, length = self._to_device([[chunk.row for chunk in chunks], lengths])
        if sampled is None:
            tokens, results.first_tokens = self._sample_first(chunks, index, length, hidden, results, masks)
        else:
            is_scored = any(chunk.row in table.num_logprobs for chunk in chunks)
            assert not is_scored, "first tokens that a round sampled have no log-probabilities"
            results.first_tokens = sampled[index]
            tokens = results.first_tokens.clamp(min=0)
        table.processors.count(index, tokens)
        begin_decode(table.numbers.state(), index, tokens, length, self._block_size)

    def warm_up(self, num_prompts: int, masks: Masks) -> None:
        """Runs the launches that follow prompts, with and without logits processors. All are for row 0, which
        stays padding. masks: those of all rows, none of which is masked."""
        numbers, processors = self._table.numbers, self._table.processors
        index = torch.zeros(num_prompts, dtype=torch.int64, device=self._table.device)
        logits = self._model.logits(self._model.no_states(num_prompts))
        for used in (None, processors.at(index)):
            no_window = index[:, None][:, :0]
            pick_tokens(logits[:, None], numbers.at(index, used), index, no_window, masks=masks.at(index))
        row = index[:1]
        begin_decode(numbers.state(), row, row, row + 1, self._block_size)
        numbers.release(row)

    def _sample_first(
        self,
        chunks: Sequence[PrefillChunk],
        index: torch.Tensor,  # [chunks] int64: their rows
        positions: torch.Tensor,  # [chunks] int64: the first ones after the prompts
        hidden: torch.Tensor,  # [chunks, hidden], of the last prompt tokens
        results: DeviceResults,
        masks: Masks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [chunks] int64: the tokens at these positions, and the same for the host with NO_TOKEN
        where the logits were broken. Fills in the log-probabilities that are wanted.

        Few rows are sampled at a time, because their logits processors are copied, 9 bytes for each token of
        the vocabulary.
        """
        num_logprobs = self._table.num_logprobs
        wanted = {i: n for i, c in enumerate(chunks) if (n := num_logprobs.get(c.row)) is not None}
        tokens, told, scores = [], [], []
        for first in range(0, len(chunks), SCORED_AT_ONCE):
            part = slice(first, first + SCORED_AT_ONCE)
            some = index[part]
            logits = self._model.logits(hidden[part])
            no_window = some.new_zeros((len(some), 0))
            broken = torch.empty((len(some), 1), dtype=torch.bool, device=some.device)
            rows = self._table.at(some)
            places = [i - first for i in wanted if first <= i < part.stop]
            sampled = pick_tokens(
                logits[:, None], rows, positions[part], no_window,
                masks=None if masks is None else masks.at(some), keeps_logits=bool(places), broken=broken,
            )[:, 0]  # fmt: skip
            tokens.append(sampled)
            told.append(sampled.masked_fill(broken[:, 0], NO_TOKEN))
            if places:
                scored = self._to_device(places)
                scores.append(score_tokens(logits[scored], sampled[scored]))
        if wanted:
            results.first_logprobs = (wanted, torch.cat(scores)[:, None])
        return torch.cat(tokens), torch.cat(told)

    def _score_prompt(self, chunk: PrefillChunk, hidden: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Returns the number of top tokens and the scores of the chunk's tokens. hidden: [tokens, hidden],
        from the chunk's first token on. Logits are computed for a few tokens at a time."""
        if not chunk.scored_token_ids:
            return None
        tokens = torch.split(self._to_device(chunk.scored_token_ids), SCORED_AT_ONCE)
        states = torch.split(hidden[: len(chunk.scored_token_ids)], SCORED_AT_ONCE)
        scores = [score_tokens(self._model.logits(h), t) for h, t in zip(states, tokens, strict=True)]
        return chunk.num_top, torch.cat(scores)

    def _to_device(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(values, self._table.device)
