"""How many prompt tokens a step computes (chunked prefill), and whether they share the decode round's forward pass.

Knows numbers only. Sharing a pass saves reading the weights once more for few prompt tokens (mixed batches as in
Sarathi-Serve, arXiv 2403.02310); a pass of prompts alone keeps small rounds batch-invariant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headway.engine.scheduling.plan import PrefillChunk

DEFAULT_CHUNK = 512
# The most prompt tokens of a mixed pass. One prompt gets at most MAX_LATE_TOKENS of them once LATE_KEYS of its keys are
# cached, since its attention takes long, too.
MAX_MIXED_TOKENS, MAX_LATE_TOKENS, LATE_KEYS = 640, 512, 5120
# With more cached keys the chunks need the split-KV kernel, which a mixed pass does not launch for prompts.
MAX_MIXED_KEYS = 8192


class Load(NamedTuple):
    """The decode round that the step's prompt tokens would delay.

    num_tokens: of all windows, rows * (depth + 1); 0 without a round. is_common: whether mixed passes exist for rounds
    of its kind: at least one row drafts at full depth, and no row adjusts its logits or returns log-probabilities.
    num_keys: cached tokens of the prompt that is computed first.
    """

    num_tokens: int
    is_common: bool
    num_keys: int


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """Prompt tokens of a step:

    ============================================  ==============  =============================
    the step's decode round                       prompt tokens   forward pass of the prompts
    ============================================  ==============  =============================
    none                                          `idle`          their own
    at most `mixed_above_tokens`, or uncommon     `separate`      their own, before the round
    larger                                        `mixed`         the round's
    larger, `late_keys` or more cached keys       `mixed_late`    the round's
    larger, more than `max_mixed_keys`            `separate`      their own, before the round
    ============================================  ==============  =============================

    mixed_above_tokens: None where no round shares its pass.
    """

    idle: int
    separate: int
    mixed: int
    mixed_late: int
    mixed_above_tokens: int | None = None
    late_keys: int = LATE_KEYS
    max_mixed_keys: int = MAX_MIXED_KEYS

    @classmethod
    def uniform(cls, num_tokens: int, *, mixed_above_tokens: int | None = None) -> PrefillPolicy:
        """The same number of prompt tokens in every step."""
        return cls(num_tokens, num_tokens, num_tokens, num_tokens, mixed_above_tokens)

    @property
    def most_tokens(self) -> int:
        """The most prompt tokens of a pass of their own."""
        return max(self.idle, self.separate)

    def budget(self, load: Load) -> int:
        """Returns the most prompt tokens of the step."""
        if load.num_tokens == 0:
            return self.idle
        if load.num_keys > self.max_mixed_keys or not self._mixes_with(load):
            return self.separate
        return self.mixed_late if load.num_keys >= self.late_keys else self.mixed

    def mixes(self, chunks: Iterable[PrefillChunk], load: Load) -> bool:
        """Returns whether these chunks share the round's forward pass."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        has_few_keys = all(chunk.start <= self.max_mixed_keys for chunk in chunks)
        return 0 < sum(lengths) <= MAX_MIXED_TOKENS and has_few_keys and self._mixes_with(load)

    def _mixes_with(self, load: Load) -> bool:
        above = self.mixed_above_tokens
        return above is not None and load.num_tokens > above and load.is_common
