"""Keeps clients' chat text literal: structural tokens that clients spell out never become those tokens.

Before the template runs a second time, each is replaced by an unguessable mark (escaping.py). The marks tell
which tokens of the rendered text were spelled out by a client, and which the template wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_LETTER = r"[^\W\d_]"
_BARS = re.compile(r"<[|\uff5c].*[^\W_].*[|\uff5c]>", re.DOTALL)
_ANGLES = re.compile(rf"<+/?([^<>]*{_LETTER}[^<>]*)>+")
_UPPER_CASE = re.compile(r"\[/?[\w -]*[A-Z]{2}[\w -]*\]")
_DELIMITERS = "<>[]{}|\uff5c:#@$~^"
# HTML tags that tokenizers have for ordinary text (Gemma 3's has 60 of them). <s> is not among them: most
# tokenizers that have it begin a text with it.
_HTML = re.compile(
    "a|abbr|b|blockquote|body|br|button|caption|center|code|col|colgroup|dd|del|div|dl|dt|em|figcaption|figure|font|"
    "footer|form|h[1-6]|head|header|hr|html|i|iframe|img|ins|kbd|li|link|meta|nav|ol|option|p|pre|q|script|select|"
    "small|span|strike|strong|style|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|tr|tt|u|ul|var",
    re.IGNORECASE,
)


def is_structural(token: str, *, is_special: bool, template: str) -> bool:
    """Returns whether an added token gives chats their structure, so that only a template may write it.

    True for special tokens, for `<|...|>`, `<...>` except HTML tags, and `[UPPER_CASE]`. Also true for tokens
    with a letter that begin or end with a delimiter, such as `USER:`, if the template's source contains them.
    False for white space, digits, emoji and words, which are ordinary text.
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


def json_form(text: str) -> str:
    """Returns the text as a template writes it within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def control_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern that finds structural tokens in a text, the longest first; None if there are none.

    The search takes linear time however many tokens there are, because tokens share their prefixes in the
    pattern.
    """
    wanted = sorted({text for text in texts if text})
    return re.compile(_trie(wanted)) if wanted else None


def _trie(texts: Sequence[str]) -> str:
    """texts: sorted, so that the prefix which the first and the last of a group share is shared by all of
    it."""
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
        """Yields (text, whether a client spelled structural tokens in it). A mark that the template cut
        stays text."""
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
        """Returns the text without marks."""
        return "".join(text for text, _ in self.pieces())


@dataclass(frozen=True, slots=True)
class TokenParts:
    """Parts of structural tokens, from which a template that joins texts without a space could form a
    token."""

    beginnings: frozenset[str]
    endings: frozenset[str]
    joined: str
    longest: int

    def is_inside(self, text: str) -> bool:
        """Returns whether the text is a part of a token; it may be true for a few other texts."""
        return len(text) < self.longest and text in self.joined

    def ending(self, text: str) -> str:
        """Returns the longest end of a token with which the text begins."""
        return next((text[:n] for n in range(self.longest, 0, -1) if text[:n] in self.endings), "")

    def beginning(self, text: str) -> str:
        """Returns the longest beginning of a token with which the text ends."""
        return next((text[-n:] for n in range(self.longest, 0, -1) if text[-n:] in self.beginnings), "")


def token_parts(texts: Iterable[str]) -> TokenParts:
    tokens = sorted(set(texts))
    return TokenParts(
        beginnings=frozenset(token[:n] for token in tokens for n in range(1, len(token))),
        endings=frozenset(token[n:] for token in tokens for n in range(1, len(token))),
        joined="\0".join(tokens),
        longest=max(map(len, tokens), default=0),
    )
