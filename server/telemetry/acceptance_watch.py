"""Watches how often the first draft of a round is accepted, and says once when that falls far below what was
usual.

The texts are right all the same, so that speed is the only other sign of a changed chat template or a wrong
head.
"""

from __future__ import annotations

import logging
from collections import deque

# A window ends with the first reading at which it has this many drafts and has lasted for so long.
WINDOW_DRAFTS, WINDOW_SECONDS = 256, 10.0
# A window that lasts longer, as where drafts were turned off, tells nothing of now.
MOST_SECONDS = 600.0
# Compared are the mean of the last windows and that of all before them. The latter is known after
# FIRST_WINDOWS; from LONG_WINDOWS on each new one has the weight 1 / LONG_WINDOWS, so that a change that
# lasts becomes usual after half a day of traffic, unless less than LEAST_USUAL is accepted.
RECENT_WINDOWS, FIRST_WINDOWS, LONG_WINDOWS = 12, 12, 2048
# Shares of what was usual. The limits differ, so that a share near one of them is logged once.
LEAVING_SHARE, RETURNING_SHARE = 0.5, 0.7
# A head that is usually right less often is not watched. At 0.05, 12 windows of 256 drafts have half of it by
# chance once in 10^10: six standard deviations.
LEAST_USUAL = 0.05

logger = logging.getLogger("headway.server")


class AcceptanceWatch:
    """Mutable: `read` is its only writer. is_in_band: True also while too little is known."""

    def __init__(self) -> None:
        self.is_in_band = True
        self._begin: tuple[float, int, int] | None = None
        self._recent: deque[float] = deque()
        self._usual = 0.0
        self._num_windows = 0  # of the usual share

    def read(self, seconds: float, num_drafted: int, num_accepted: int) -> None:
        """Takes in the counters of first drafts at a moment. seconds: monotonic."""
        if self._begin is None:
            self._begin = seconds, num_drafted, num_accepted
        begin, past_drafted, past_accepted = self._begin
        drafted = num_drafted - past_drafted
        if drafted >= WINDOW_DRAFTS and seconds - begin >= WINDOW_SECONDS:
            self._begin = seconds, num_drafted, num_accepted
            self._end_window((num_accepted - past_accepted) / drafted)
        elif not self.is_in_band and seconds - begin > MOST_SECONDS:
            self._begin = seconds, num_drafted, num_accepted
            self._recent.clear()
            self.is_in_band = True
            logger.info("first drafts have become too few to say how often they are accepted")

    def _end_window(self, share: float) -> None:
        self._recent.append(share)
        if len(self._recent) > RECENT_WINDOWS:
            past = self._recent.popleft()
            if self.is_in_band or past >= LEAST_USUAL:
                self._num_windows = min(self._num_windows + 1, LONG_WINDOWS)
                self._usual += (past - self._usual) / self._num_windows
        if self._num_windows >= FIRST_WINDOWS and len(self._recent) == RECENT_WINDOWS:
            self._compare(sum(self._recent) / RECENT_WINDOWS)

    def _compare(self, share: float) -> None:
        limit = LEAVING_SHARE if self.is_in_band else RETURNING_SHARE
        is_in_band = self._usual < LEAST_USUAL or share >= limit * self._usual
        if is_in_band != self.is_in_band:
            self.is_in_band = is_in_band
            self._tell(share)

    def _tell(self, share: float) -> None:
        percent, usual_percent = 100 * share, 100 * self._usual
        fields = {
            "first_draft_acceptance": round(share, 3),
            "usual_first_draft_acceptance": round(self._usual, 3),
        }
        if self.is_in_band:
            message = "%.1f %% of the first drafts are accepted, which is near the usual %.1f %% again"
            logger.info(message, percent, usual_percent, extra={"fields": fields})
            return
        message = (
            "only %.1f %% of the first drafts are accepted, %.1f %% were before. Texts are right, but slower than they could be. "
            "Likely causes: traffic of another kind (temperature, language, grammars), a changed chat template, or with an MTP head "
            "one that does not belong to the model"
        )
        logger.warning(message, percent, usual_percent, extra={"fields": fields})
