"""Grammars over the vocabulary of the simulated device: each token but the last is one printable
character."""

from __future__ import annotations

import ctypes
from functools import cache

from llguidance import LLMatcher

from headway.engine.grammar.compile import compile_matcher, make_tokenizer, regex_source
from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import MaskBuffer
from headway.engine.protocol.grammar import Thinking, TokenTable

VOCAB_SIZE = 97
END_ID = VOCAB_SIZE - 1
PATTERNS = ("[A-Za-z]{1,40}", "(ab|cd|ef){0,9}x", "[0-9]*", '"[^"]{0,70}"', "z")
_WORDS = -(-VOCAB_SIZE // 32)


@cache
def compiled(pattern: str) -> LLMatcher:
    table = TokenTable([*(bytes([32 + i]) for i in range(END_ID)), b"<end>"], [END_ID], [END_ID])
    return compile_matcher(make_tokenizer(table, VOCAB_SIZE), regex_source(pattern))


def new_guide(pattern: str, thinking: Thinking | None = None) -> Guide:
    return Guide(compiled(pattern), thinking, end_ids=[END_ID])


class MaskMemory:
    """A buffer for the masks of some rows, which tests can read."""

    def __init__(self, num_entries: int, window: int) -> None:
        self._memory = (ctypes.c_int32 * (num_entries * window * _WORDS))()
        self.buffer = MaskBuffer(ctypes.addressof(self._memory), num_entries, window, _WORDS)

    def allows(self, entry: int, place: int, token_id: int) -> bool:
        data = ctypes.string_at(self.buffer.address_of(entry, place), self.buffer.line_bytes)
        return bool(data[token_id // 8] >> (token_id % 8) & 1)


def is_allowed(guide: Guide, token_id: int) -> bool:
    """Asks the library token by token what the guide allows next."""
    if guide.is_free:
        return token_id not in guide.end_ids
    return token_id == guide.opening_id or bool(
        guide.matcher.compute_bitmask()[token_id // 8] >> (token_id % 8) & 1
    )
