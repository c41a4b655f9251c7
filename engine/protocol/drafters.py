"""The names and traits of drafters, for planning and messages. The drafters themselves are in
`speculation`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from headway.engine.protocol.errors import ConfigError

# N-gram lookup searches this many first tokens of a prediction.
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
    """Returns the drafter that --drafter names, and its folder or ORG/NAME if it is given by one; the name is
    then auto. Raises ConfigError if n-gram lookup would join no drafter."""
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
    """by: names the drafter in the log of a start. has_drafts: whether it ever drafts. leaves_pending: it
    processes the tokens of a round when the next one drafts. So rounds without drafts leave some pending,
    with which it has to catch up, and its state of a block is final later than the target's. has_weights: it
    has weights, which may be wrong. reads_head: its weights are the model's own draft head.
    searches_predictions: it drafts from predicted outputs.
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
