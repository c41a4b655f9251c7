"""Every name of a drafter stands for one."""

from __future__ import annotations

from typing import get_args

import pytest

from headway.engine.protocol.drafters import (
    DRAFTER_TRAITS,
    JOINED,
    DrafterName,
    wanted_drafter,
    without_ngrams,
)
from headway.engine.protocol.errors import ConfigError


def test_every_name_but_auto_has_its_traits() -> None:
    assert {*DRAFTER_TRAITS, "auto", "auto,ngram"} == set(get_args(DrafterName))


def test_what_ngrams_join_keeps_its_traits() -> None:
    for alone, joined in JOINED.items():
        assert without_ngrams(joined) == without_ngrams(alone) == alone
        if alone != "auto":
            found, before = DRAFTER_TRAITS[joined], DRAFTER_TRAITS[alone]
            assert (found.leaves_pending, found.reads_head) == (before.leaves_pending, before.reads_head)
            assert (found.searches_predictions, before.searches_predictions) == (True, False)


@pytest.mark.parametrize(
    ("given", "name", "path"),
    [
        ("mtp,ngram", "mtp,ngram", None),
        ("auto,ngram", "auto,ngram", None),
        ("ORG/NAME,ngram", "auto,ngram", "ORG/NAME"),
        ("./a,b,ngram", "auto,ngram", "./a,b"),
        ("./a,b", "auto", "./a,b"),
    ],
)
def test_ngrams_join_what_is_named_before_the_last_comma(given: str, name: str, path: str | None) -> None:
    assert wanted_drafter(given) == (name, path)


@pytest.mark.parametrize("given", ["ngram,ngram", "none,ngram", ",ngram"])
def test_ngrams_join_no_nothing(given: str) -> None:
    with pytest.raises(ConfigError, match=f"--drafter is {given}; ngram joins auto, mtp, a folder"):
        wanted_drafter(given)
