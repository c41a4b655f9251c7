"""Decides from a few texts whether a drafter agrees with the model. Knows tokens and probabilities, no
tensors and no engine.

Both tests are relative to the model itself, since a right head is often wrong where the next token is
uncertain:

    sure    where the model gives its token 0.9 or more, a right head nearly always drafts it. A sequential
            test (Wald, 1945) of an agreement of RIGHT_SHARE against one of BROKEN_SHARE.
    chance  in greedy texts, a head that knows nothing of the text is right at most as often as the most
            frequent token comes.

A drafter from a folder of its own is judged by chance alone: it may be much smaller than the model, or lack
most of its tokens.
"""

from __future__ import annotations

import math
from collections import Counter

from headway.engine.protocol.draft_check import DraftCheck, DraftCheckState

SURE_PROBABILITY = 0.9
RIGHT_SHARE, BROKEN_SHARE = 0.9, 0.65
# The error rates of the sequential test: a right head is called broken, and a broken one right. A head that
# agrees in 0.73, which is neither, passes once in some 200 times; with an error rate of 1e-2 it would once in
# 8.
FALSE_ALARM, FALSE_PASS = 1e-4, 1e-5
# The level at which an agreement of RIGHT_SHARE is ruled out where the texts end before the sequential test.
LATE_FALSE_ALARM = 1e-3
# A test gives no verdict for fewer first drafts than these.
LEAST_SURE, LEAST_GREEDY = 24, 32
# Once there are this many first drafts, only a sequential test that is under way asks for more.
ENOUGH_DRAFTS = 512
# A head is above chance at the level CHANCE_LEVEL. Another head has failed if it is right in less than
# LEAST_SHARE, at the level FALSE_ALARM.
CHANCE_LEVEL, LEAST_SHARE = 1e-2, 0.15
# A text in which one token makes up more than this is a loop that any head can follow.
MOST_CHANCE = 0.5


CAUSES = {
    False: "its tensors are zero, shuffled or another model's, the halves of its projection are swapped, its norms lack their offset "
    "of 1, its positions are off by one, or its weights are wrongly scaled",
    True: "its weights are damaged or another layer's, its norms have their offset of 1 twice, or it reads hidden states on the "
    "wrong side of the final norm",
}
CAUSE_OF_FOLDER = "it was made for another model or another tokenizer, or its weights are damaged"


class Evidence:
    """Mutable: collects the rounds of a check. A pair of successive tokens counts once, so that repetitive
    texts do not count more than once.

    knows_sure: a right drafter nearly always drafts what the model is all but sure of.
    """

    def __init__(self, depth: int, *, knows_sure: bool = True) -> None:
        self._knows_sure = knows_sure
        self._drafted, self._accepted = [0] * depth, [0] * depth
        self._seen: set[tuple[int, int, bool]] = set()
        self._greedy_tokens: Counter[int] = Counter()
        self._num_greedy = self._num_greedy_accepted = 0
        self._num_sure = self._num_sure_accepted = 0
        self._num_drafts = self._num_right = 0

    def observe(
        self,
        previous: int,
        token: int,
        *,
        probability: float,
        num_drafted: int,
        num_accepted: int,
        is_greedy: bool,
    ) -> None:
        """Adds a row's round with drafts. token: the first token of the round, which follows `previous`;
        probability: its probability by the model."""
        for position in range(num_drafted if is_greedy else 0):
            self._drafted[position] += 1
            self._accepted[position] += position < num_accepted
        self._num_drafts += 1
        pair = (previous, token, is_greedy)
        if pair in self._seen:
            return
        self._seen.add(pair)
        is_right = num_accepted > 0
        self._num_right += is_right
        if is_greedy:
            self._greedy_tokens[token] += 1
            self._num_greedy += 1
            self._num_greedy_accepted += is_right
        if probability >= SURE_PROBABILITY:
            self._num_sure += 1
            self._num_sure_accepted += is_right

    @property
    def share_right(self) -> float:
        """Returns the share of first drafts that were accepted, in sampled texts, too; 0 if there are
        none."""
        return self._num_right / max(len(self._seen), 1)

    @property
    def num_first_drafts(self) -> int:
        """Returns the number of first drafts that were seen, in sampled texts, too."""
        return len(self._seen)

    @property
    def wants_more(self) -> bool:
        """Returns whether further rounds may change the verdict."""
        if not self._knows_sure:
            return self._num_drafts < ENOUGH_DRAFTS
        is_under_way = self._num_sure >= LEAST_SURE
        return self.is_right_where_sure() is None and (is_under_way or self._num_drafts < ENOUGH_DRAFTS)

    def is_right_where_sure(self) -> bool | None:
        """Returns the verdict of the test of sure tokens; None while there is none."""
        if self._num_sure < LEAST_SURE:
            return None
        ratio = self._log_ratio()
        if ratio <= math.log(FALSE_ALARM):
            return False
        return True if ratio >= -math.log(FALSE_PASS) else None

    def _log_ratio(self) -> float:
        """Returns the logarithm of the likelihood of the sure tokens under a right head over that under a
        broken one."""
        wrong = self._num_sure - self._num_sure_accepted
        agreed = self._num_sure_accepted * math.log(RIGHT_SHARE / BROKEN_SHARE)
        return agreed + wrong * math.log((1 - RIGHT_SHARE) / (1 - BROKEN_SHARE))

    def is_above_chance(self) -> bool | None:
        """Returns the verdict of the test of greedy texts; None where they do not tell."""
        chance, count, hits = self.chance, self._num_greedy, self._num_greedy_accepted
        if chance is None or count < LEAST_GREEDY or chance > MOST_CHANCE:
            return None
        if _tail(count, hits, chance) <= CHANCE_LEVEL:
            return True
        is_poor = 1 - _tail(count, hits + 1, LEAST_SHARE) <= FALSE_ALARM
        return False if is_poor else None

    @property
    def chance(self) -> float | None:
        if not self._num_greedy:
            return None
        return max(self._greedy_tokens.values()) / self._num_greedy

    def is_right(self) -> bool | None:
        """Returns the verdict of both tests after the last round. Where the model is seldom sure of its
        tokens, the test of chance decides, unless the sure tokens point the other way."""
        if not self._knows_sure:
            return self.is_above_chance()
        is_sure = self.is_right_where_sure()
        if is_sure is not None:
            return is_sure
        num_wrong = self._num_sure - self._num_sure_accepted
        if (
            self._num_sure >= LEAST_SURE
            and _tail(self._num_sure, num_wrong, 1 - RIGHT_SHARE) <= LATE_FALSE_ALARM
        ):
            return False
        is_above = self.is_above_chance()
        is_opposed = self._num_sure >= LEAST_SURE and is_above != (self._log_ratio() > 0)
        return None if is_opposed else is_above

    def verdict(self, seconds: float) -> DraftCheck:
        """Returns the result of the check."""
        is_right = self.is_right()
        return DraftCheck(
            state=_STATES[is_right],
            acceptance=[a / d if d else None for a, d in zip(self._accepted, self._drafted, strict=True)],
            chance=self.chance,
            num_sure=self._num_sure,
            num_sure_accepted=self._num_sure_accepted,
            reason="" if is_right else self._reason(is_right),
            seconds=seconds,
        )

    def _reason(self, is_right: bool | None) -> str:
        sure = f"of {self._num_sure} tokens that the model was all but sure of it drafted {self._num_sure_accepted}"
        if is_right is None:
            return f"{self._num_drafts} first drafts did not suffice to tell; {sure}"
        parts = []
        if self._num_greedy:
            share = self._num_greedy_accepted / self._num_greedy
            parts.append(
                f"{share:.0%} of {self._num_greedy} first drafts of greedy texts were accepted, a drafter that knows nothing of the text "
                f"has up to {self.chance or 0:.0%}"
            )
        if self._knows_sure and self._num_sure >= LEAST_SURE:
            parts.append(f"{sure}, {RIGHT_SHARE:.0%} are expected")
        cause = CAUSES[self.is_above_chance() is True] if self._knows_sure else CAUSE_OF_FOLDER
        return f"{'; '.join(parts)}. Likely, {cause}"


_STATES: dict[bool | None, DraftCheckState] = {None: "not_checked", True: "passed", False: "failed"}


def _tail(count: int, hits: int, rate: float) -> float:
    """Returns the probability of that many hits or more of `count` independent trials, 0 < rate < 1."""
    return math.fsum(
        math.exp(
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            + k * math.log(rate) + (count - k) * math.log1p(-rate)
        )
        for k in range(hits, count + 1)
    )  # fmt: skip
