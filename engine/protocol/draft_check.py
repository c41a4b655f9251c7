"""The result of the check of a starting engine whether its drafter agrees with the model."""

from __future__ import annotations

from typing import Literal

import msgspec

# none: nothing is to be checked. missing: config.json announces a head, and the weights have none that can be
# used. passed, failed: the drafter was checked. not_checked: the check had too little evidence.
DraftCheckState = Literal["none", "missing", "passed", "failed", "not_checked"]


class DraftCheck(msgspec.Struct, frozen=True, kw_only=True):
    """acceptance: the share of accepted drafts in greedy texts by position; None where there were none.
    chance: the most acceptance at position 1 of a drafter that does not see the text; None where it is
    unknown. num_sure, num_sure_accepted: the number of first drafts where the model was almost sure of the
    token, and of the accepted ones among them. reason: why the state is not passed, with the likely cause.
    """

    state: DraftCheckState = "none"
    acceptance: list[float | None] = []
    chance: float | None = None
    num_sure: int = 0
    num_sure_accepted: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def turns_speculation_off(self) -> bool:
        return self.state == "failed"
