"""Finds stop strings in text that arrives in pieces: which one is complete first, and what could still
become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A match. `end` is compared first: the stop string that is complete first wins, and of those that end
    together the longest.

    end, start: characters from the beginning of the text.
    """

    end: int
    start: int
    stop: str


class StopMatcher:
    """Finds stop strings in one text, whatever its pieces. Mutable: `push` and `passes` are its only
    writers; holds text that could begin a stop string. position: in characters; no stop string can begin
    before it any more."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._first_characters = frozenset(s[0] for s in stop)
        self._max_held = max(map(len, stop), default=1) - 1
        self._held = ""
        self.position = 0

    @property
    def length(self) -> int:
        """Returns the number of characters so far."""
        return self.position + len(self._held)

    def find(self, text: str, ripe: int) -> Match | None:
        """Returns the match if the text were the next piece. ripe: only matches that end after this
        position count."""
        if not self._stop:
            return None
        text = self._held + text
        least = ripe - self.position + 1
        first: Match | None = None
        for s in self._stop:
            at = text.find(s, max(0, least - len(s)))
            if at >= 0:
                match = Match(self.position + at + len(s), self.position + at, s)
                first = match if first is None else min(first, match)
        return first

    def passes(self, text: str) -> bool:
        """Returns whether no stop string begins in the text or before it; the text is then added, as by
        `push`."""
        if self._held or not self._first_characters.isdisjoint(text):
            return False
        self.position += len(text)
        return True

    def push(self, text: str, ripe: int) -> Match | None:
        match = self.find(text, ripe)
        text = self._held + text
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        self.position += len(text) - num_held
        return match

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        tail = text[-self._max_held :] if self._max_held else ""
        if self._first_characters.isdisjoint(tail):
            return 0
        ends = (tail[i:] for i, character in enumerate(tail) if character in self._first_characters)
        return next((len(end) for end in ends if any(s.startswith(end) for s in self._stop)), 0)


class SilentMatcher:
    """Finds stop strings in a text that includes the silent special tokens, each at its place.

    Its results are in characters of the shown text. Mutable: `push` and `push_silent` are its only writers.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._matcher = StopMatcher(stop)
        self._ripe = 0
        self._silent: list[tuple[int, int]] = []  # (start, end) of the silent pieces that a match may reach

    @property
    def position(self) -> int:
        """Returns the position in the shown text before which no stop string can begin any more."""
        return self._shown(self._matcher.position)

    def push(self, text: str, *, is_ripe: bool) -> Match | None:
        return self._told(self._matcher.push(text, self._ripe_from(text, is_ripe=is_ripe)))

    def push_silent(self, content: str, pending: str, *, is_ripe: bool) -> Match | None:
        """content: the text that the token would show. pending: the shown text before it that is not
        certain yet."""
        start = self._matcher.length
        ripe = self._ripe_from(content, is_ripe=is_ripe)
        if pending and (match := self._matcher.find(pending + content, ripe)) is not None:
            self._silent.append((start + len(pending), start + len(pending) + len(content)))
            return self._told(match)
        self._silent.append((start, start + len(content)))
        return self._told(self._matcher.push(content, ripe))

    def _ripe_from(self, text: str, *, is_ripe: bool) -> int:
        if not is_ripe:
            self._ripe = self._matcher.length + len(text)
        return self._ripe

    def _told(self, match: Match | None) -> Match | None:
        return match and Match(self._shown(match.end), self._shown(match.start), match.stop)

    def _shown(self, position: int) -> int:
        """Returns the position in the shown text; inside a silent piece it is the beginning of that piece."""
        return position - sum(min(end, position) - start for start, end in self._silent if start < position)
