"""The drafters that an engine can have, as far as others plan by them and tell of them; what they compute is
in `speculation`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from headway.engine.protocol.errors import ConfigError

# The first tokens of a prediction that n-gram lookup searches; the others are not looked at.
MAX_PREDICTION = 1 << 14
# The names of drafters. In a running engine auto has been resolved to one of the others.
DrafterName = Literal[
    "auto", "mtp", "ngram", "none", "eagle3", "trained_head", "draft_model",
    "auto,ngram", "mtp,ngram", "eagle3,ngram", "trained_head,ngram", "draft_model,ngram",
]  # fmt: skip
# The drafters that n-gram lookup can join, and the names of the joined ones.
JOINED: dict[DrafterName, DrafterName] = {
    "auto": "auto,ngram",
    "mtp": "mtp,ngram",
    "eagle3": "eagle3,ngram",
    "trained_head": "trained_head,ngram",
    "draft_model": "draft_model,ngram",
}
# The drafters that --drafter can name; the others are found in a drafter's folder.
NAMED_DRAFTERS: tuple[DrafterName, ...] = ("auto", "mtp", "ngram", "none")


def wanted_drafter(given: str) -> tuple[DrafterName, str | None]:
    """Returns the drafter that --drafter names, and where one is that it names no other way: a folder or
    ORG/NAME, whose name is then auto. Raises ConfigError where n-gram lookup is to join nothing."""
    for name in (*NAMED_DRAFTERS, JOINED["auto"], JOINED["mtp"]):
        if given == name:
            return name, None
    first, _, joined = given.rpartition(",")
    if joined != "ngram":
        return "auto", given
    if first in ("", *NAMED_DRAFTERS):
        raise ConfigError(
            f"--drafter is {given}; ngram joins auto, mtp, a folder or ORG/NAME, as in mtp,ngram"
        )
    return "auto,ngram", first


def without_ngrams(name: DrafterName) -> DrafterName:
    """Returns the drafter that n-gram lookup has joined, or the same one where it has joined none."""
    return next((alone for alone, joined in JOINED.items() if joined == name), name)


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """by: how a start says what drafts. has_drafts: whether it ever does. leaves_pending: it sees the tokens
    of a round when the next one drafts, so that rounds without drafts leave some pending, with which it has
    to catch up, and what it keeps of a block is final later than the target's part. has_weights: those may be
    wrong. reads_head: they are those of the model's draft head. searches_predictions: it drafts from what an
    output is predicted to be.
    """

    by: str
    has_drafts: bool = True
    leaves_pending: bool = False
    has_weights: bool = False
    reads_head: bool = False
    searches_predictions: bool = False


DRAFTER_TRAITS: dict[DrafterName, DrafterTraits] = {
    "mtp": DrafterTraits("by the model's MTP head", leaves_pending=True, has_weights=True, reads_head=True),
    "ngram": DrafterTraits("by n-gram lookup", searches_predictions=True),
    "none": DrafterTraits("by nothing", has_drafts=False),
    "eagle3": DrafterTraits("by an EAGLE-3 head", leaves_pending=True, has_weights=True),
    "trained_head": DrafterTraits("by a trained MTP head", leaves_pending=True, has_weights=True),
    "draft_model": DrafterTraits("by a draft model", leaves_pending=True, has_weights=True),
}
DRAFTER_TRAITS |= {
    joined: replace(traits, by=f"{traits.by} and n-gram lookup", searches_predictions=True)
    for alone, joined in JOINED.items()
    if (traits := DRAFTER_TRAITS.get(alone)) is not None
}
