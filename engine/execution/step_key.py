"""The sizes of padded steps: which exist, which one holds a plan, and in which order they are captured.

Numbers only. A key names one CUDA graph; what is computed under it is in step.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.engine.execution.padded_prefill import MAX_CHUNKS
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.scheduling.prefill_policy import MAX_MIXED_TOKENS, MIXED_STEP, PrefillPolicy
from headway.kernels import PaddedForm, padded_form, splits_keys

# From 64 rows on the time of a round grows with its rows, so that padding costs time.
_ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112)
ROW_STEP = 32
# Rounds that share their pass with prompts are padded to every second number of rows, and to at least this
# number of tokens: most tokens of such a pass are prompt tokens, and each depth needs its own graphs.
_LEAST_MIXED_TOKENS = 64
# The device needs longer for more prompt tokens than a slow host needs to launch their kernels (7B model,
# H200).
MAX_REPLAYED_TOKENS = 1024
_TOKEN_COUNTS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, MAX_REPLAYED_TOKENS)


class StepKey(NamedTuple):
    """One forward pass of fixed sizes, and what follows it.

    num_rows, depth: the size of the decode round, padding included; 0 rows: there is no round.
    num_prompt_tokens: includes padding; 0: there are no prompts. is_window: the prompt tokens are one short
    chunk. is_adjusted: logits processors are applied to the round. is_masked: grammars restrict some rows;
    the step runs in two halves. keeps_logits: the outcome has the round's logits, for log-probabilities.
    catches_up: instead of a forward pass, the drafter processes the tokens that rounds without drafts have
    left pending.
    """

    num_rows: int = 0
    depth: int = 0
    num_prompt_tokens: int = 0
    is_window: bool = False
    is_adjusted: bool = False
    keeps_logits: bool = False
    is_masked: bool = False
    catches_up: bool = False


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The padded sizes in ascending order. mixed_counts: the numbers of prompt tokens that share a pass with
    a round. Prompts of more tokens than the largest count, of more than MAX_CHUNKS chunks or with many cached
    keys have no key."""

    row_counts: tuple[int, ...]
    prompt_counts: tuple[int, ...] = ()
    mixed_counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, max_rows: int, max_prompt_tokens: int = 0, max_mixed_tokens: int = 0) -> StepGrid:
        """Returns the sizes up to these limits. 0 prompt tokens: prompts are not padded at all."""
        if max_prompt_tokens == 0:
            return cls(row_counts(max_rows))
        mixed = mixed_token_counts(min(max_mixed_tokens, max_prompt_tokens))
        return cls(row_counts(max_rows), token_counts(max_prompt_tokens), mixed)

    def round(self, wanted: StepKey) -> StepKey:
        """Returns the key of the smallest round that holds the rows of the wanted one."""
        return wanted._replace(num_rows=next(n for n in self.row_counts if n >= wanted.num_rows))

    def mixed(self, wanted: StepKey, chunks: Sequence[PrefillChunk]) -> StepKey | None:
        """Returns the key of the round with these chunks in its pass; None where they need a pass of their
        own."""
        num_tokens = _padded_count(chunks, self.mixed_counts)
        if num_tokens is None or splits_keys(_most_cached(chunks)):
            return None
        num_rows = next(n for n in self._mixed_row_counts(wanted.depth) if n >= wanted.num_rows)
        return wanted._replace(num_rows=num_rows, num_prompt_tokens=num_tokens)

    def prompts(self, chunks: Sequence[PrefillChunk]) -> StepKey | None:
        """Returns the key of a pass of these chunks alone; None where they are launched kernel by kernel."""
        num_tokens = _padded_count(chunks, self.prompt_counts)
        if num_tokens is None:
            return None
        form = padded_form(len(chunks), num_tokens, _most_cached(chunks))
        is_window = form is PaddedForm.WINDOW
        return None if form is None else StepKey(num_prompt_tokens=num_tokens, is_window=is_window)

    def catch_up(self, num_rows: int) -> StepKey:
        """Returns the key under which the drafter catches up with this number of rows. It does so rarely and
        takes a short time, so that every second size is enough."""
        return StepKey(next(n for n in self._fewer_row_counts if n >= num_rows), catches_up=True)

    @property
    def _fewer_row_counts(self) -> tuple[int, ...]:
        return self.row_counts[::-2][::-1]

    def _mixed_row_counts(self, depth: int) -> tuple[int, ...]:
        least = min(-(-_LEAST_MIXED_TOKENS // (depth + 1)), self.row_counts[-1])
        return tuple(n for n in self._fewer_row_counts if n >= least)

    def captured(self, depths: Iterable[int], policy: PrefillPolicy, *, catches_up: bool) -> list[StepKey]:
        """Returns the keys to be captured at the start: mixed passes, prompts, rounds of all depths, and
        catching up. The largest of each kind comes first, so that the smaller ones fit into its memory."""
        deepest_first = sorted(depths, reverse=True)
        mixed = [
            StepKey(n, depth, tokens)
            for depth in deepest_first
            for n in reversed(self._mixed_row_counts(depth))
            for tokens in reversed(self.mixed_counts)
            if policy.may_mix(n * (depth + 1), tokens)
        ]
        prompts = [
            StepKey(num_prompt_tokens=tokens, is_window=is_window)
            for tokens in reversed(self.prompt_counts)
            for is_window in (True, False)
            if not is_window or padded_form(1, tokens, 0) is PaddedForm.WINDOW
        ]
        rounds = [StepKey(n, depth) for n in reversed(self.row_counts) for depth in deepest_first]
        late = [self.catch_up(n) for n in reversed(self._fewer_row_counts) if catches_up]
        return mixed + prompts + rounds + late


def _padded_count(chunks: Sequence[PrefillChunk], counts: Sequence[int]) -> int | None:
    """Returns the smallest of the ascending counts that holds the chunks, if one does."""
    needed = sum(len(chunk.token_ids) for chunk in chunks)
    if len(chunks) > MAX_CHUNKS:
        return None
    return next((count for count in counts if count >= needed), None)


def _most_cached(chunks: Sequence[PrefillChunk]) -> int:
    """Returns the largest number of cached tokens before one of the chunks."""
    return max(chunk.start for chunk in chunks)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, ... and max_rows."""
    steps = range(_ROW_COUNTS[-1] // ROW_STEP * ROW_STEP + ROW_STEP, max_rows, ROW_STEP)
    return (*(n for n in (*_ROW_COUNTS, *steps) if n < max_rows), max_rows)


def token_counts(max_tokens: int) -> tuple[int, ...]:
    """Returns the counts of prompt tokens up to max_tokens, at least one."""
    return tuple(n for n in _TOKEN_COUNTS if n <= max_tokens) or (max_tokens,)


def mixed_token_counts(max_tokens: int) -> tuple[int, ...]:
    """Returns the prompt tokens of mixed passes: multiples of MIXED_STEP below max_tokens, or
    MAX_MIXED_TOKENS, and that."""
    most = min(max_tokens, MAX_MIXED_TOKENS)
    return (*range(MIXED_STEP, most, MIXED_STEP), most)
