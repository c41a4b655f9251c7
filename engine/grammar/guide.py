"""The state of a request in its grammar: the consumed tokens, and the end of its reasoning, which no grammar
governs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.grammar import Thinking

DEAD_END = "grammar_dead_end"
MAX_RENEWALS = 16  # of a request; each of them takes the loop's time
# Parts of the library's messages: for a lexer with the most states that it may have, and for a text that no
# token, or no given token, continues.
_LEXER_IS_FULL = "too many states"
_NOTHING_FITS = ("NoExtension", "doesn't satisfy the grammar")


class Guide:
    """Mutable: `advance` is called with every token of the output, in its order, by the scheduler alone."""

    def __init__(
        self,
        matcher: LLMatcher,
        thinking: Thinking | None = None,
        *,
        end_ids: Sequence[int] = (),
        renew: Callable[[LLMatcher], LLMatcher] = lambda matcher: matcher,
    ) -> None:
        """matcher: a matcher at the beginning of the grammar, which is not changed. end_ids: the tokens that
        end a text, which must not come within the reasoning. renew: returns a matcher in place of one whose
        lexer, which all its copies share, is full."""
        self._beginning = matcher
        self._renew = renew
        self._num_renewals = 0
        self.matcher = matcher.deep_copy()
        self._consumed: list[int] = []
        self._dead_end: tuple[int, str] | None = None  # tokens up to it, and why nothing may follow them
        self.end_ids = tuple(end_ids)
        self._thinking = thinking
        self._is_free = thinking is not None and thinking.is_open
        self._is_first = True
        self._recent: list[int] = []  # the last tokens of the reasoning, as many as close it

    def at_beginning(self) -> Guide:
        """Returns another guide by the same grammar that has consumed nothing."""
        return Guide(self._beginning, self._thinking, end_ids=self.end_ids, renew=self._renew)

    @property
    def is_free(self) -> bool:
        """Returns whether the next token is a part of the reasoning."""
        return self._is_free

    @property
    def opening_id(self) -> int | None:
        """Returns the token that may come next in addition to those of the grammar: it opens the
        reasoning."""
        is_possible = self._is_first and not self._is_free and self._thinking is not None
        return self._thinking.start_id if is_possible and self._thinking is not None else None

    def num_free(self, drafts: Sequence[int]) -> int:
        """Returns the number of next tokens that are a part of the reasoning if the drafts are right: 0 to
        len(drafts) + 1."""
        if not self._is_free:
            return 0
        recent = list(self._recent)
        for count, token_id in enumerate(drafts, start=1):
            if self._closes(recent, token_id):
                return count
        return len(drafts) + 1

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consumes tokens of the output. Raises RequestError if the grammar does not allow one."""
        for count, token_id in enumerate(token_ids):
            if self._dead_end is not None and self._dead_end[0] == count:
                raise self.dead_end(self._dead_end[1])
            if self.opening_id == token_id:
                self._is_free = True
            elif self._is_free:
                self._is_free = not self._closes(self._recent, token_id)
            else:
                self._consume(token_id)
            self._is_first = False
        self._dead_end = None

    def look_ahead(self, num_free: int, drafts: Sequence[int]) -> list[bytes]:
        """Returns the masks of the positions from num_free on, as far as the drafts lead, after a fault of
        the library at one of them.

        A matcher with a fault stays unusable, but the fault may lie behind a draft that is rejected. So the
        matcher is made anew, and the text ends only if it reaches the position of the fault. Raises
        RequestError if that is the next position.
        """
        self._restart()
        ahead, masks = self.matcher.deep_copy(), list[bytes]()
        for draft in (*drafts[num_free:], None):
            mask = ahead.compute_bitmask()
            if ahead.is_error():
                self._dead_end = num_free + len(masks), ahead.get_error()
                break
            masks.append(mask)
            if draft is None or not ahead.consume_token(draft):
                break
        if self._dead_end is not None and self._dead_end[0] == 0:
            raise self.dead_end(self._dead_end[1])
        return masks

    def _consume(self, token_id: int) -> None:
        is_consumed = self.matcher.consume_token(token_id)
        if not is_consumed and _LEXER_IS_FULL in self.matcher.get_error():
            self._restart()
            is_consumed = self.matcher.consume_token(token_id)
        if not is_consumed:
            raise self.dead_end(self.matcher.get_error())
        self._consumed.append(token_id)

    def _restart(self) -> None:
        """Makes the matcher anew, at the same position."""
        if _LEXER_IS_FULL in self.matcher.get_error() and self._num_renewals < MAX_RENEWALS:
            self._num_renewals += 1
            self._beginning = self._renew(self._beginning)
        self.matcher = self._beginning.deep_copy()
        self.matcher.consume_tokens(self._consumed)

    def dead_end(self, why: str = "") -> RequestError:
        """Returns the error of a request for which no token is left. why: the message of the library; it may
        also name one of its limits."""
        reason = "no token of this model is allowed at this place; loosen the schema or the grammar"
        if why and not any(part in why for part in _NOTHING_FITS):
            reason = f"{why.splitlines()[0][:300]}; simplify the schema or the grammar"
        message = f"the text cannot be continued within its grammar: {reason}"
        return RequestError(message, code=DEAD_END)

    def _closes(self, recent: list[int], token_id: int) -> bool:
        """Adds the token to the last ones of the reasoning, and returns whether they close it."""
        assert self._thinking is not None, "only a request with reasoning is free"
        end_ids = self._thinking.end_ids
        recent.append(token_id)
        del recent[: max(0, len(recent) - len(end_ids))]
        return recent == end_ids
