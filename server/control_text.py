"""What people write in a chat is text: control tokens that they spell out never become control tokens.

Before the template runs, each is replaced by a mark that nobody can guess; afterwards the marks are spelled out
again, by a tokenizer to which control tokens are text like any other. Only the template itself writes them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat. spelled: the control tokens that were replaced; number i by `mark` + i + `~`."""

    text: str
    mark: str = ""
    spelled: tuple[str, ...] = ()

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(text, whether control tokens in it are only spelled). A mark that the template has cut stays text."""
        if not self.spelled:
            yield self.text, False
            return
        parts = re.split(re.escape(self.mark) + r"(\d+)~", self.text)
        for i, part in enumerate(parts):
            if i % 2:
                yield self.spelled[int(part)], True
            elif part:
                yield part, False


def control_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds control tokens in a text, the longest of those that begin together; None if there are none."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class Marker:
    """Mutable: the control tokens that were found in one chat so far. The mark has nothing that templates change:
    no letters, no spaces, nothing that JSON escapes."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._mark = f"~{secrets.randbelow(10**18):018}~"
        self._spelled: list[str] = []

    def protect(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """The messages with marks in place of control tokens."""
        if self._pattern is None:
            return list(messages)
        return [{name: self._replaced(value) for name, value in message.items()} for message in messages]

    def prompt(self, text: str) -> ChatPrompt:
        """What the template made of the protected messages."""
        return ChatPrompt(text, self._mark, tuple(self._spelled))

    def _replaced(self, text: str) -> str:
        assert self._pattern is not None
        return self._pattern.sub(self._marked, text)

    def _marked(self, match: re.Match[str]) -> str:
        self._spelled.append(match[0])
        return f"{self._mark}{len(self._spelled) - 1}~"
