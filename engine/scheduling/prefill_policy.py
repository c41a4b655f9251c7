"""Decides how many prompt tokens a step computes (chunked prefill), and whether they share the decode round's
forward pass.

Knows numbers only. Sharing a pass saves reading the weights once more for few prompt tokens (mixed batches as
in Sarathi-Serve, arXiv 2403.02310). Many prompts that wait, a burst, get long passes of their own. Each pass
delays the next token of every stream that runs, so that there are few of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headway.engine.scheduling.plan import PrefillChunk

DEFAULT_CHUNK = 512
# A mixed pass takes at most MAX_MIXED_TOKENS prompt tokens, and at most MIXED_SHARE for each token of its
# round, rounded up to MIXED_STEP, so that it takes less than twice as long as the round alone: for a round of
# 128 tokens of a 7B model at depth 0 an H100 takes 8.2 ms, 11.4 with 256 prompt tokens and 14 with 384, an
# H200 6.4 and 14 with 384.
MAX_MIXED_TOKENS, MIXED_SHARE, MIXED_STEP = 384, 2, 128
# With more cached keys the chunks need the split-KV kernel, which a mixed pass does not launch for prompts.
MAX_MIXED_KEYS = 8192
# Once prompts have filled every step for so long beside few streams, with at most MIXED_STEP tokens, they get
# passes of their own. These delay the streams more, but compute several times as many prompt tokens a second:
# otherwise long prompts would keep all others waiting for the sake of few.
PATIENCE_SECONDS = 1.0
# Prompts are a burst if at least so many wait, and so many for each row of the round.
LEAST_BURST, BURST_SHARE = 8, 0.25
# One of so many gaps between the tokens of streams may be long, which leaves the 99th percentile as it is.
GAPS_PER_LONG_GAP = 200
# A stream that runs as a burst comes may wait for three passes: for the prompts that came first, and for two
# halves of 128 others.
MOST_OF_A_STREAM = 2
# More is forgotten: most of those who waited have ended.
MOST_OF_ALL = 3  # a stream


class Load(NamedTuple):
    """The decode round that the step's prompt tokens would delay.

    num_tokens: of all windows, rows * (depth + 1); 0 without a round. is_common: whether mixed passes exist
    for rounds of its kind: no row adjusts its logits or returns log-probabilities. num_keys: cached tokens of
    the prompt that is computed first. seconds_full: for which prompts have filled every step. num_rows: of
    the round. num_waiting: prompts that are not computed yet, as far as there are rows for them.
    most_long_gaps, num_long_gaps: of one stream and of all, see `long_gaps_after`.
    """

    num_tokens: int
    is_common: bool
    num_keys: int
    seconds_full: float
    num_rows: int
    num_waiting: int
    most_long_gaps: float
    num_long_gaps: float


def long_gaps_after(before: float, num_rows: int, *, is_long: bool) -> float:
    """Returns the long gaps that streams have had, less one for every GAPS_PER_LONG_GAP gaps, after one gap
    more in each of num_rows streams."""
    return before + num_rows if is_long else max(before - num_rows / GAPS_PER_LONG_GAP, 0.0)


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """Prompt tokens of a step:

    ============================================  =====================  =============================
    the step's decode round                       prompt tokens          forward pass of the prompts
    ============================================  =====================  =============================
    none                                          `idle`                 their own
    any, during a burst                           `idle`                 their own, before the round
    at most `mixed_above_tokens`, or uncommon     `separate`             their own, before the round
    larger                                        `mixed_with`, at most  the round's
                                                  `mixed`
    larger, more than `max_mixed_keys`            `separate`             their own, before the round
    up to 64 tokens, full `PATIENCE_SECONDS`      `separate`             their own, before the round
    ============================================  =====================  =============================

    mixed_above_tokens: None where no round shares its pass. A burst has no other passes where `idle` is not
    more than `separate`.
    """

    idle: int
    separate: int
    mixed: int
    mixed_above_tokens: int | None = None
    max_mixed_keys: int = MAX_MIXED_KEYS

    @classmethod
    def uniform(cls, num_tokens: int, *, mixed_above_tokens: int | None = None) -> PrefillPolicy:
        """Returns a policy with the same number of prompt tokens in every step, but for mixed passes, which
        may take fewer."""
        mixed = min(num_tokens, MAX_MIXED_TOKENS)
        return cls(num_tokens, num_tokens, mixed, mixed_above_tokens=mixed_above_tokens)

    @property
    def most_tokens(self) -> int:
        """The most prompt tokens of a pass of their own."""
        return max(self.idle, self.separate)

    @property
    def least_tokens(self) -> int:
        """The fewest prompt tokens that a step may be limited to."""
        return min(
            self.idle, self.separate, self.mixed_with(1) if self.mixed_above_tokens is not None else self.idle
        )

    def budget(self, load: Load) -> int:
        """Returns the most prompt tokens of the step."""
        return self.idle if load.num_tokens == 0 or self._has_burst(load) else self._usual(load)

    def delays(self, chunks: Iterable[PrefillChunk], load: Load) -> bool:
        """Returns whether a pass of these chunks alone is a long one, as only a burst gets it."""
        return sum(len(chunk.token_ids) for chunk in chunks) > self._usual(load)

    def _has_burst(self, load: Load) -> bool:
        """Returns whether many prompts wait, and the long gaps that are not made up for are less than one a
        stream, on average, and at most MOST_OF_A_STREAM of any."""
        are_many = load.num_waiting >= max(LEAST_BURST, BURST_SHARE * load.num_rows)
        return (
            are_many
            and self.idle > self.separate
            and load.most_long_gaps <= MOST_OF_A_STREAM
            and load.num_long_gaps < load.num_rows
        )

    def _usual(self, load: Load) -> int:
        if load.num_keys > self.max_mixed_keys or not self._mixes_with(load):
            return self.separate
        mixed = self.mixed_with(load.num_tokens)
        return self.separate if mixed == MIXED_STEP and load.seconds_full > PATIENCE_SECONDS else mixed

    def mixed_with(self, num_round_tokens: int) -> int:
        """Returns the most prompt tokens of a mixed pass with a round of this number of tokens."""
        share = -(-MIXED_SHARE * num_round_tokens // MIXED_STEP) * MIXED_STEP
        return min(self.mixed, share)

    def may_mix(self, num_round_tokens: int, num_prompt_tokens: int) -> bool:
        """Returns whether a round of at most num_round_tokens may share its pass with more prompt tokens than
        num_prompt_tokens - MIXED_STEP, for which a graph with room for num_prompt_tokens is needed."""
        above = self.mixed_above_tokens
        is_reached = num_prompt_tokens - MIXED_STEP < self.mixed_with(num_round_tokens)
        return above is not None and num_round_tokens > above and is_reached

    def mixes(self, chunks: Iterable[PrefillChunk], load: Load) -> bool:
        """Returns whether these chunks share the round's forward pass."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        has_few_keys = all(chunk.start <= self.max_mixed_keys for chunk in chunks)
        return (
            0 < sum(lengths) <= self.mixed_with(load.num_tokens) and has_few_keys and self._mixes_with(load)
        )

    def _mixes_with(self, load: Load) -> bool:
        above = self.mixed_above_tokens
        return above is not None and load.num_tokens > above and load.is_common
