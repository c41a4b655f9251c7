"""The result of the self-check by which an engine tries, while it starts, whether its drafter drafts what the
model says."""

from __future__ import annotations

from typing import Literal

import msgspec

# none: nothing is to be checked. missing: config.json announces a head, the weights have none that can be
# used. passed, failed: the drafter was tried. not_checked: it was tried, and what came did not suffice to
# tell.
DraftCheckState = Literal["none", "missing", "passed", "failed", "not_checked"]


class DraftCheck(msgspec.Struct, frozen=True, kw_only=True):
    """acceptance: by position, the share of the drafts of greedy texts that were accepted; None where there
    were none. chance: the acceptance at position 1 of a drafter that knows nothing of the text, at most; None
    where that is unknown. num_sure, num_sure_accepted: first drafts where the model itself was all but sure
    of the token, and how many of them were accepted. reason: why the state is not passed, with the likely
    cause.
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
