"""Keeps clients' chat text literal: structural tokens that they spell out never become those tokens.

Before the template runs a second time, each is replaced by an unguessable mark. The marks tell which
tokens of the rendered text were spelled out by a client and which were written by the template.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.server.template_frames import MarkedMessages

# The one field of a message that holds no text of the client, but a word of the server's own list.
ROLE = "role"
_LETTER = r"[^\W\d_]"
_BARS = re.compile(r"<[|\uff5c].*[^\W_].*[|\uff5c]>", re.DOTALL)
_ANGLES = re.compile(rf"<+/?([^<>]*{_LETTER}[^<>]*)>+")
_UPPER_CASE = re.compile(r"\[/?[\w -]*[A-Z]{2}[\w -]*\]")
_DELIMITERS = "<>[]{}|\uff5c:#@$~^"
# Tags of HTML that tokenizers have for ordinary text (Gemma 3's has 60 of them). <s> is not one of them: most
# tokenizers that have it begin a text with it.
_HTML = re.compile(
    "a|abbr|b|blockquote|body|br|button|caption|center|code|col|colgroup|dd|del|div|dl|dt|em|figcaption|figure|font|"
    "footer|form|h[1-6]|head|header|hr|html|i|iframe|img|ins|kbd|li|link|meta|nav|ol|option|p|pre|q|script|select|"
    "small|span|strike|strong|style|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|tr|tt|u|ul|var",
    re.IGNORECASE,
)


def is_structural(token: str, *, is_special: bool, template: str) -> bool:
    """Returns whether an added token gives chats their form, so that only a template may write it.

    True for special tokens, for `<|...|>`, `<...>` except tags of HTML, and `[UPPER_CASE]`. Also true for tokens with
    a letter that begin or end with a delimiter, such as `USER:`, where the template's source has them. False for
    white space, digits, emoji and words, which are ordinary text.
    """
    text = token.strip()
    if not text:
        return False
    if is_special or _BARS.search(text) or _UPPER_CASE.fullmatch(text):
        return True
    angles = _ANGLES.fullmatch(text)
    if angles is not None and not _HTML.fullmatch(angles[1].split()[0].rstrip("/")):
        return True
    is_delimited = text[0] in _DELIMITERS or text[-1] in _DELIMITERS
    return is_delimited and re.search(_LETTER, text) is not None and text in template


def control_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds structural tokens in a text, the longest of those that begin together; None if there are none.

    The time is linear in the text however many tokens there are: tokens share their beginnings in the pattern.
    """
    wanted = sorted({text for text in texts if text})
    return re.compile(_trie(wanted)) if wanted else None


def _trie(texts: Sequence[str]) -> str:
    """texts: sorted, so that the first and the last of those that begin alike share what all of them share."""
    by_first: dict[str, list[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        shared = _common_length(group[0], group[-1])
        branches.append(re.escape(group[0][:shared]) + _trie([text[shared:] for text in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}"


def _common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat. spelled: the texts that were replaced by marks; number i by `mark` + i + `~`."""

    text: str
    mark: str = ""
    spelled: tuple[str, ...] = ()

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yields (text, whether a client spelled structural tokens in it). A mark that the template cut stays text."""
        if not self.spelled:
            yield self.text, False
            return
        parts = re.split(re.escape(self.mark) + r"(\d+)~", self.text)
        for i, part in enumerate(parts):
            if i % 2:
                yield self.spelled[int(part)], True
            elif part:
                yield part, False

    def spelled_out(self) -> str:
        """The text without marks."""
        return "".join(text for text, _ in self.pieces())


@dataclass(frozen=True, slots=True)
class TokenParts:
    """Parts of structural tokens, from which a template that joins texts without a space could form a token."""

    beginnings: frozenset[str]
    endings: frozenset[str]
    joined: str
    longest: int

    def is_inside(self, text: str) -> bool:
        """Returns whether the text is a part of a token; a few texts that are none are taken for one, too."""
        return len(text) < self.longest and text in self.joined

    def ending(self, text: str) -> str:
        """The longest end of a token with which the text begins."""
        return next((text[:n] for n in range(self.longest, 0, -1) if text[:n] in self.endings), "")

    def beginning(self, text: str) -> str:
        """The longest beginning of a token with which the text ends."""
        return next((text[-n:] for n in range(self.longest, 0, -1) if text[-n:] in self.beginnings), "")


def token_parts(texts: Iterable[str]) -> TokenParts:
    tokens = sorted(set(texts))
    return TokenParts(
        beginnings=frozenset(token[:n] for token in tokens for n in range(1, len(token))),
        endings=frozenset(token[n:] for token in tokens for n in range(1, len(token))),
        joined="\0".join(tokens),
        longest=max(map(len, tokens), default=0),
    )


class Marker:
    """Mutable: collects the texts that it replaces in one chat; `marked` is its only writer.

    The mark has nothing that templates change: no letters, no spaces, nothing that JSON escapes.
    """

    def __init__(self, pattern: re.Pattern[str] | None, parts: TokenParts | None = None) -> None:
        self._pattern = pattern
        self._parts = parts
        self._mark = f"~{secrets.randbelow(10**18):018}~"
        self._numbers: dict[str, int] = {}
        self._joins = False

    def marked(self, messages: Sequence[dict[str, str]]) -> MarkedMessages | None:
        """The messages with marks in place of structural tokens, and of their parts at the ends of texts.

        None if they have neither.
        """
        if self._pattern is None:
            return None
        if self._parts is not None:
            self._joins = any(self._may_join(message, self._parts) for message in messages)
        by_tokens = [self._message(message, None) for message in messages]
        by_parts = [self._message(message, self._parts) for message in messages]
        if not self._numbers:
            return None
        return MarkedMessages(
            messages=by_tokens,
            with_parts=None if by_parts == by_tokens else by_parts,
            mark=self._mark,
            spelled=tuple(self._numbers),
        )

    def _may_join(self, message: dict[str, str], parts: TokenParts) -> bool:
        """Returns whether the middle of a token, such as `think`, may get its ends: from other texts, or, as words that
        templates put between delimiters do, from the template."""
        texts = [text.strip() for name, text in message.items() if name != ROLE]
        return len(texts) > 1 or any(parts.ending(text) or parts.beginning(text) for text in texts)

    def _message(self, message: dict[str, str], parts: TokenParts | None) -> dict[str, str]:
        return {name: text if name == ROLE else self._replaced(text, parts) for name, text in message.items()}

    def _replaced(self, text: str, parts: TokenParts | None) -> str:
        assert self._pattern is not None
        if parts is None:
            return self._pattern.sub(lambda match: self._marked(match[0]), text)
        replaced = []
        at = 0
        for match in self._pattern.finditer(text):
            between = text[at : match.start()]
            replaced += [self._first_part(between, parts) if at == 0 else between, self._marked(match[0])]
            at = match.end()
        if at:
            return "".join([*replaced, self._last_part(text[at:], parts)])
        if self._joins and text.strip() and parts.is_inside(text.strip()):
            return text.replace(text.strip(), self._marked(text.strip()))
        return self._last_part(self._first_part(text, parts), parts)

    def _first_part(self, text: str, parts: TokenParts) -> str:
        """Templates may trim a text: white space around it stays outside of the mark."""
        trimmed = text.lstrip()
        part = parts.ending(trimmed)
        return text[: len(text) - len(trimmed)] + self._marked(part) + trimmed[len(part) :] if part else text

    def _last_part(self, text: str, parts: TokenParts) -> str:
        trimmed = text.rstrip()
        part = parts.beginning(trimmed)
        cut = len(trimmed) - len(part)
        return text[:cut] + self._marked(part) + text[len(trimmed) :] if part else text

    def _marked(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._numbers))
        return f"{self._mark}{number}~"
