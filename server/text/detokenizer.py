"""Decodes token ids to text as they arrive: no character is split, no stop string is shown, and each id is
decoded once.

The text of all deltas together equals the decoding of all ids at once, however the ids were split into
rounds.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

from headway.server.text.stop_strings import Match, SilentMatcher, StopMatcher

REPLACEMENT = "�"
MAX_PENDING = 16  # tokens held back for a character that does not complete
CONTEXT_TOKENS = 32  # how far back in the prompt an anchor token is searched


def _byte_of_character() -> dict[str, int]:
    """Returns the printable stand-ins of byte-level tokenizers for bytes (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _is_mistaken(content: str) -> bool:
    return not content.isascii() and all(character in BYTE_OF_CHARACTER for character in content)


class Vocabulary:
    """The tables that all detokenizers of one model share. Mutable: fills its table of token bytes at first
    use.

    shows_special: special tokens are text like any other; otherwise they are silent, except those whose
    content is in `shown`.
    """

    def __init__(
        self, tokenizer: HFTokenizer, *, shows_special: bool = False, shown: Collection[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._contents = {i: token.content.encode() for i, token in added.items() if token.special}
        hidden = () if shows_special else self._contents.items()
        self._silent = {i: content for i, content in hidden if content.decode() not in shown}
        self._added = {i: token.content.encode() for i, token in added.items()}
        # Added tokens that the library's decoder mistakes for stand-ins of bytes.
        self._mistaken = {i for i, content in self._added.items() if _is_mistaken(content.decode())}
        self._anchor = [] if self.is_byte_level else tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._bytes: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.is_byte_level and not self._mistaken.isdisjoint(token_ids):
            return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        if len(self._silent) == len(self._contents):
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        shown = [token_id for token_id in token_ids if token_id not in self._silent]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes, possibly part of a character; empty if the token is silent."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or token_id in self._silent:
            return b""
        if token_id in self._contents or (self.is_byte_level and token_id in self._added):
            return self._added[token_id]  # added tokens are stored as they are, not as stand-ins for bytes
        if self.stands_for_a_byte(token_id):
            return bytes([int(token[3:5], 16)])
        if not self.is_byte_level:
            return self.decode([*self._anchor, token_id])[len(self.decode(self._anchor)) :].encode()
        try:
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:
            return token.encode()

    def silent_text(self, token_id: int) -> str:
        """Returns the text that a silent special token would show; empty for any other token."""
        return self._silent.get(token_id, b"").decode()

    def has_silent_text(self, text: str) -> bool:
        """Returns whether the text contains the spelling of a special token that is not shown."""
        return any(content and content.decode() in text for content in self._silent.values())

    def stands_for_a_byte(self, token_id: int) -> bool:
        """Returns whether the token is a byte-fallback token `<0x00>` .. `<0xFF>`. The meaning of a run of
        them is known only at its end."""
        return not self.is_byte_level and bool(
            _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "")
        )

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._silent or self.tokenizer.id_to_token(token_id) is None


class Decoder(Protocol):
    """Decodes ids to text that is certain. There are two kinds: by bytes, and by the tokenizer's own
    decoder in a window."""

    def push(self, token_id: int) -> str: ...
    def rest(self) -> str:
        """Returns the undecided rest as it would read if the text ended here."""
        ...


class ByteDecoder:
    """Decodes the tokens of byte-level tokenizers. Mutable: holds the bytes of an incomplete character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def rest(self) -> str:
        state = self._utf8.getstate()
        text = self._utf8.decode(b"", final=True)
        self._utf8.setstate(state)
        return text


class WindowDecoder:
    """Decodes for all other tokenizers: new tokens are decoded after the last token that was shown.

    That token, the anchor, prevents the decoder from treating the new ones as the start of a text, which
    would drop a space. Mutable: holds tokens whose text is not certain.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._anchor = [i for i in prompt_token_ids[-CONTEXT_TOKENS:] if self._is_anchor(i)][-1:]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_silent(token_id):
            return ""
        self._pending.append(token_id)
        if self._vocabulary.stands_for_a_byte(token_id):
            return ""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        self._anchor, self._pending = [token_id], []
        return text

    def rest(self) -> str:
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        shown = self._vocabulary.decode(self._anchor)
        return self._vocabulary.decode(self._anchor + self._pending)[len(shown) :]

    def _is_anchor(self, token_id: int) -> bool:
        return not (self._vocabulary.is_silent(token_id) or self._vocabulary.stands_for_a_byte(token_id))


class Decoded(NamedTuple):
    """text: the text that may be shown now. num_tokens: the number of ids used; fewer than given after a
    stop string. stop: the stop string that ended the text."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """The text of one choice. Mutable: owned by that choice.

    A stop string that contains a silent special token is also found where that token came. min_tokens: a stop
    string counts only if a token after the first min_tokens completes it. num_characters: decoded so far,
    shown or held back.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        shows_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder: Decoder = (
            ByteDecoder(vocabulary)
            if vocabulary.is_byte_level
            else WindowDecoder(vocabulary, prompt_token_ids)
        )
        self._shows_stop = shows_stop
        self._min_tokens = min_tokens if stop else 0
        self._num_tokens = 0
        self._ripe = 0  # characters of the first min_tokens tokens
        self._matcher = StopMatcher(stop)
        watched = [s for s in stop if vocabulary.has_silent_text(s)]
        self._silent_matcher = SilentMatcher(watched) if watched else None
        self._held = ""
        self.num_characters = 0

    def push(self, token_ids: Sequence[int]) -> Decoded:
        if self._silent_matcher is None:
            return self._push(token_ids)
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            decoded = self._push_watched(token_id, self._silent_matcher)
            texts.append(decoded.text)
            if decoded.stop is not None:
                return Decoded("".join(texts), count, decoded.stop)
        return Decoded("".join(texts), len(token_ids))

    def start_of(self, token_id: int, before: int) -> int:
        """Returns where the text of the token begins that was pushed last, alone. before: num_characters
        before it.

        The rest of an incomplete character comes with the next token, and precedes its text.
        """
        try:
            text = self._vocabulary.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return before
        return max(before, self.num_characters - len(text)) if text else before

    def flush(self) -> Decoded:
        """Ends the text: everything that was held back is certain now."""
        rest = self._decoder.rest()
        self._take([rest], num_tokens=0)
        matches = [self._matcher.push(rest, self._ripe)]
        if self._silent_matcher is not None:
            matches.append(self._silent_matcher.push(rest, is_ripe=self._is_ripe))
        if (match := min(filter(None, matches), default=None)) is not None:
            return Decoded(self._ended(match), 0, match.stop)
        return Decoded(self._released(self.num_characters), 0)

    @property
    def _is_ripe(self) -> bool:
        """Returns whether the newest token may complete a stop string."""
        return not self._min_tokens or self._num_tokens > self._min_tokens

    def _push(self, token_ids: Sequence[int]) -> Decoded:
        """Decodes all at once. Tokens are examined one by one only if a stop string is complete."""
        pieces = [self._decoder.push(token_id) for token_id in token_ids]
        text = "".join(pieces)
        # Most texts contain no beginning of a stop string, and nothing is held back.
        if not (self._min_tokens or self._held) and self._matcher.passes(text):
            self._num_tokens += len(token_ids)
            self.num_characters += len(text)
            return Decoded(text, len(token_ids))
        before = self.num_characters
        decoded = self._take(pieces, num_tokens=len(pieces))
        match = self._matcher.push(decoded, self._ripe)
        if match is None:
            return Decoded(self._released(self._matcher.position), len(token_ids))
        ends = list(accumulate(map(len, pieces), initial=before))[1:]
        num_tokens = next(count for count, end in enumerate(ends, start=1) if end >= match.end)
        text = self._ended(match)
        self.num_characters = ends[num_tokens - 1]
        return Decoded(text, num_tokens, match.stop)

    def _push_watched(self, token_id: int, silent_matcher: SilentMatcher) -> Decoded:
        piece = self._decoder.push(token_id)
        self._take([piece], num_tokens=1)
        match = self._matcher.push(piece, self._ripe)
        pending = ""
        if content := self._vocabulary.silent_text(token_id):
            pending = self._decoder.rest()
            watched = silent_matcher.push_silent(content, pending, is_ripe=self._is_ripe)
        else:
            watched = silent_matcher.push(piece, is_ripe=self._is_ripe)
        match = min(filter(None, (match, watched)), default=None)
        if match is None:
            return Decoded(self._released(min(self._matcher.position, silent_matcher.position)), 1)
        self._take(
            [pending], num_tokens=0
        )  # the text before a silent token is certain if the token ends the text
        return Decoded(self._ended(match), 1, match.stop)

    def _take(self, pieces: Sequence[str], *, num_tokens: int) -> str:
        """Returns the text of the next tokens, which is held back from now on."""
        text = "".join(pieces)
        if not self._num_tokens + num_tokens > self._min_tokens:
            self._ripe = self.num_characters + len(text)
        elif self._num_tokens < self._min_tokens:
            self._ripe = self.num_characters + sum(map(len, pieces[: self._min_tokens - self._num_tokens]))
        self._num_tokens += num_tokens
        self._held += text
        self.num_characters += len(text)
        return text

    def _released(self, position: int) -> str:
        """Returns and removes the held text before a position."""
        count = position - (self.num_characters - len(self._held))
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _ended(self, match: Match) -> str:
        """Returns the text before a stop string, and the stop string if it is shown."""
        text = self._released(match.start)
        self._held = ""
        return text + (match.stop if self._shows_stop else "")
