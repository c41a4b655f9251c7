"""Finds the end of an answer's content: the first stop string or stop token in it. Reasoning and calls are
not searched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from headway.server.formats import Content, OutputParser, Piece, ToolCall
from headway.server.text.stop_strings import Match, SilentMatcher, StopMatcher


@dataclass(frozen=True, slots=True)
class StopOptions:
    """The stops of a content. token_ids: those of the request; the engine handles the model's own, which end
    the whole output.

    min_tokens: a stop that is complete within this many first tokens does not count. shows_stop: the stop is
    part of the content. silent_text: returns the text that a hidden special token would show; empty for other
    tokens.
    """

    strings: Sequence[str] = ()
    token_ids: Collection[int] = ()
    min_tokens: int = 0
    shows_stop: bool = False
    silent_text: Callable[[int], str] = lambda token_id: ""
    watched: Sequence[str] = ()  # the strings that contain the text of a hidden special token


@dataclass(frozen=True, slots=True)
class _Found:
    """A stop in the content. end, start: in characters of the content."""

    end: int
    start: int
    stop: str | int


class ContentStops:
    """Ends the pieces of one output at the first stop in their content. Mutable: owned by the choice's
    output.

    The content is searched as a whole, whatever comes between its pieces. Pieces are held back, in order,
    while a stop string could begin before them. stop: the string or the id that was found.
    """

    def __init__(self, options: StopOptions, *, is_single_call: bool = False) -> None:
        """is_single_call: nothing follows the first call."""
        self._options = options
        self._is_single_call = is_single_call
        self._matcher = StopMatcher(options.strings)
        self._silent_matcher = SilentMatcher(options.watched) if options.watched else None
        self._num_tokens = 0
        self._num_fed = 0  # characters of the output
        self._ripe_start: int | None = None  # None: no token may complete a stop yet
        self._ripe = 0
        # (start, end, id) of stop tokens in the output of which it is not known yet if they are in the
        # content.
        self._tokens: list[tuple[int, int, int]] = []
        self._waiting: deque[Piece] = deque()
        self._num_taken = self._num_released = 0  # characters of the content
        self.stop: str | int | None = None

    @property
    def is_used(self) -> bool:
        return bool(self._options.strings or self._options.token_ids)

    def feed(self, token_id: int, text: str, start: int, parser: OutputParser) -> list[Piece]:
        """Passes the text of the next token to the parser, and returns the pieces that are certain then.
        start: the index of the token's own text."""
        self._num_tokens += 1
        if self._num_tokens == self._options.min_tokens + 1:
            self._ripe_start = self._num_fed
        self._num_fed += len(text)
        is_stop = token_id in self._options.token_ids and self._ripe_start is not None
        if is_stop and text:
            self._tokens.append((start, self._num_fed, token_id))
        pieces = self.take(parser.feed(text)) if text else []
        if text or self.stop is not None or not parser.is_in_content:
            return pieces
        if is_stop:
            return [*pieces, *self._ended(parser.finish(), None, token_id)]
        silent = self._options.silent_text(token_id)
        if self._silent_matcher is None or not silent:
            return pieces
        is_ripe = self._ripe_start is not None
        match = self._silent_matcher.push_silent(silent, parser.held_content, is_ripe=is_ripe)
        return pieces if match is None else [*pieces, *self._ended(parser.finish(), match)]

    def take(self, pieces: Iterable[Piece], *, is_last: bool = False) -> list[Piece]:
        """Returns the pieces that are certain now; nothing after a stop."""
        end: int | None = None
        for piece in pieces:
            if self.stop is not None and (end is None or end <= self._num_taken):
                break
            self._waiting.append(piece)
            if isinstance(piece, Content):
                found = self._search(piece) if end is None else None
                self._num_taken += len(piece.text)
                if found is not None:
                    self.stop, end = found.stop, found.end if self._options.shows_stop else found.start
            elif self._is_single_call and isinstance(piece, ToolCall):
                is_last = True
                break
        if end is not None:
            released = self._released(end)
            self._waiting.clear()
            return released
        if is_last:
            return self._released(None)
        position = self._matcher.position
        if self._silent_matcher is not None:
            position = min(position, self._silent_matcher.position)
        return self._released(position)

    def _ended(
        self, pieces: Iterable[Piece], match: Match | None, token_id: int | None = None
    ) -> list[Piece]:
        """Returns the last pieces before the hidden token that ended the content, unless a stop comes
        earlier in them."""
        released = self.take(pieces)
        if self.stop is None:
            self.stop = token_id if match is None else match.stop
            released += self._released(None if match is None else match.start)
            if match is not None and self._options.shows_stop:
                released.append(Content(match.stop, self._num_fed))
        self._waiting.clear()
        return released

    def _search(self, piece: Content) -> _Found | None:
        before, end = self._num_taken, piece.start + len(piece.text)
        if self._ripe_start is None or self._ripe_start > piece.start:
            ripe_end = end if self._ripe_start is None else min(self._ripe_start, end)
            self._ripe = before + ripe_end - piece.start
        match = self._matcher.push(piece.text, self._ripe)
        found = [] if match is None else [_Found(*match)]
        if self._silent_matcher is not None:
            self._silent_matcher.push(piece.text, is_ripe=self._ripe_start is not None)
        found += [
            _Found(before + stop_end - piece.start, before + start - piece.start, token_id)
            for start, stop_end, token_id in self._tokens
            if piece.start <= start < end
        ]
        self._tokens = [token for token in self._tokens if token[0] >= end]
        return min(found, key=lambda one: (one.end, one.start), default=None)

    def _released(self, position: int | None) -> list[Piece]:
        """Returns and removes the pieces before a position of the content, or all."""
        released = list[Piece]()
        while self._waiting:
            piece = self._waiting.popleft()
            if isinstance(piece, Content):
                room = len(piece.text) if position is None else position - self._num_released
                if len(piece.text) > room:
                    if room > 0:
                        released.append(Content(piece.text[:room], piece.start))
                        self._num_released += room
                    self._waiting.appendleft(Content(piece.text[max(room, 0) :], piece.start + max(room, 0)))
                    return released
                self._num_released += len(piece.text)
            released.append(piece)
        return released
