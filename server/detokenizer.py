"""Token ids to text, as they come: no character is split, no stop string is shown, each id is decoded once.

The text of all deltas together is what decoding all ids at once gives, however the ids were cut into rounds.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

REPLACEMENT = "�"
MAX_PENDING = 16  # tokens held back for a character that does not complete
CONTEXT_TOKENS = 32  # how far back in the prompt to look for a token that stands for itself


def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers write for bytes (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """What every detokenizer of one model shares. Mutable: fills its table of token bytes on first use.

    shows_special: special tokens are text like any other, else they are silent.
    """

    def __init__(self, tokenizer: HFTokenizer, *, shows_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._contents = {i: token.content.encode() for i, token in added.items() if token.special}
        self._shows_special = shows_special
        self._anchor = [] if self.is_byte_level else tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._bytes: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not self._shows_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, a piece of a character perhaps; nothing if it is silent."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or self.is_silent(token_id):
            return b""
        if token_id in self._contents:
            return self._contents[token_id]
        if self.stands_for_a_byte(token_id):
            return bytes([int(token[3:5], 16)])
        if not self.is_byte_level:
            return self.decode([*self._anchor, token_id])[len(self.decode(self._anchor)) :].encode()
        if all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()

    def stands_for_a_byte(self, token_id: int) -> bool:
        """Byte-fallback tokens `<0x00>` .. `<0xFF>`: what a run of them means is known at its end only."""
        return not self.is_byte_level and bool(
            _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "")
        )

    def is_silent(self, token_id: int) -> bool:
        is_hidden = token_id in self._contents and not self._shows_special
        return is_hidden or self.tokenizer.id_to_token(token_id) is None


class Decoder(Protocol):
    """Ids to certain text. Two kinds: by bytes, and by the tokenizer's own decoder in a window."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class ByteDecoder:
    """For byte-level tokenizers. Mutable: holds the bytes of a character that is not complete."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other tokenizer: new tokens are decoded behind the last token that was shown.

    That token keeps a decoder from treating the new ones as the start of a text (which drops a space).
    Mutable: holds tokens whose text is not certain.
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

    def flush(self) -> str:
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        shown = self._vocabulary.decode(self._anchor)
        return self._vocabulary.decode(self._anchor + self._pending)[len(shown) :]

    def _is_anchor(self, token_id: int) -> bool:
        return not (self._vocabulary.is_silent(token_id) or self._vocabulary.stands_for_a_byte(token_id))


class StopMatcher:
    """Finds stop strings in text that comes in pieces. Mutable: holds what could begin one.

    The stop string that is complete first wins, the longest of those that end together; so the place of
    the cut does not depend on the pieces.
    """

    def __init__(self, stop: Sequence[str], *, shows_stop: bool = False) -> None:
        self._stop = stop
        self._shows_stop = shows_stop
        self._first_characters = frozenset(s[0] for s in stop)
        self._max_held = max(map(len, stop), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, int | None]:
        """(text that may be shown, how far into the pushed text a stop string ends, if one does)."""
        if not self._stop:
            return text, None
        num_held = len(self._held)
        text = self._held + text
        matches = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return text[: end if self._shows_stop else start], end - num_held
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        tail = text[-self._max_held :] if self._max_held else ""
        if self._first_characters.isdisjoint(tail):
            return 0
        ends = (tail[i:] for i, character in enumerate(tail) if character in self._first_characters)
        return next((len(end) for end in ends if any(s.startswith(end) for s in self._stop)), 0)


class Decoded(NamedTuple):
    """text: what may be shown now. num_tokens: ids that were used; fewer than given after a stop string."""

    text: str
    num_tokens: int
    is_stopped: bool = False


class Detokenizer:
    """The text of one choice. Mutable: owned by that choice."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        shows_stop: bool = False,
    ) -> None:
        self._decoder: Decoder = (
            ByteDecoder(vocabulary)
            if vocabulary.is_byte_level
            else WindowDecoder(vocabulary, prompt_token_ids)
        )
        self._matcher = StopMatcher(stop, shows_stop=shows_stop)
        self.num_characters = 0  # decoded so far, shown or held back

    def push(self, token_ids: Sequence[int]) -> Decoded:
        pieces = [self._decoder.push(token_id) for token_id in token_ids]
        decoded = "".join(pieces)
        text, stop_end = self._matcher.push(decoded)
        if stop_end is None:
            self.num_characters += len(decoded)
            return Decoded(text, len(token_ids))
        ends = list(accumulate(map(len, pieces)))
        num_tokens = next(count for count, end in enumerate(ends, start=1) if end >= stop_end)
        self.num_characters += ends[num_tokens - 1]
        return Decoded(text, num_tokens, is_stopped=True)

    def flush(self) -> Decoded:
        """The end: what was held back is certain now."""
        text, stop_end = self._matcher.push(self._decoder.flush())
        is_stopped = stop_end is not None
        return Decoded(text if is_stopped else text + self._matcher.flush(), 0, is_stopped)
