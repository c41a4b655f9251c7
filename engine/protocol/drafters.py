"""The drafters that an engine can have, as far as others plan by them and tell of them; what they compute is
in `speculation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The first tokens of a prediction that n-gram lookup searches; the others are not looked at.
MAX_PREDICTION = 1 << 14
# What makes drafts; in an engine that runs, auto has been resolved to one of the others.
DrafterName = Literal["auto", "mtp", "ngram", "none", "eagle3", "trained_head", "draft_model"]
# Those that a start asks for by name; the others are what a drafter's folder holds.
NAMED_DRAFTERS: tuple[DrafterName, ...] = ("auto", "mtp", "ngram", "none")


def wanted_drafter(given: str) -> tuple[DrafterName, str | None]:
    """Returns the drafter that --drafter names, and where one is that it names no other way: a folder or
    ORG/NAME, whose name is then auto."""
    return next(((name, None) for name in NAMED_DRAFTERS if name == given), ("auto", given))


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """by: how a start says what drafts. has_drafts: whether it ever does. leaves_pending: it sees the tokens
    of a round when the next one drafts, so that rounds without drafts leave some pending, with which it has
    to catch up, and what it keeps of a block is final later than the target's part. reads_head: it has the
    weights of the model's draft head.
    """

    by: str
    has_drafts: bool = True
    leaves_pending: bool = False
    reads_head: bool = False


DRAFTER_TRAITS: dict[DrafterName, DrafterTraits] = {
    "mtp": DrafterTraits("by the model's MTP head", leaves_pending=True, reads_head=True),
    "ngram": DrafterTraits("by n-gram lookup"),
    "none": DrafterTraits("by nothing", has_drafts=False),
    "eagle3": DrafterTraits("by an EAGLE-3 head", leaves_pending=True),
    "trained_head": DrafterTraits("by a trained MTP head", leaves_pending=True),
    "draft_model": DrafterTraits("by a draft model", leaves_pending=True),
}
