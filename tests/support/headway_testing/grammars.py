"""Grammars without a model: whether a text fits a source, and texts that a source allows."""

from __future__ import annotations

import random

from llguidance import LLMatcher

from headway.engine import TokenTable, compile_matcher, make_tokenizer

WORDS = [b'{"', b'":', b'": ', b', "', b'",', b"true", b"null", b"foo", b"bar", b'"}', b"00", b"\\u00"]
END = 256 + len(WORDS)
TABLE = TokenTable([bytes([i]) for i in range(256)] + WORDS + [b"<|end|>"], [END], [END])
TOKENIZER = make_tokenizer(TABLE, END + 1)
CLOSING = frozenset(b'"}]')
PATIENCE = 60  # tokens after which a walk looks for the end


def matcher(source: str) -> LLMatcher:
    return compile_matcher(TOKENIZER, source)


def fits(source: str | LLMatcher, text: str) -> bool:
    """Tells whether the whole text may be written, and may end there."""
    found = matcher(source) if isinstance(source, str) else source
    ids = list(text.encode())
    if found.validate_tokens(ids) < len(ids):
        return False
    found.consume_tokens(ids)
    may_end = found.is_accepting()
    found.reset()
    return may_end


def walk(found: LLMatcher, chance: random.Random, max_tokens: int = 200) -> str | None:
    """Returns a random text that the masks allow; None for one that does not end in time. Raises where no
    token is allowed."""
    ids: list[int] = []
    for place in range(max_tokens):
        mask = int.from_bytes(found.compute_bitmask(), "little")
        allowed = [i for i in range(END + 1) if mask >> i & 1]
        assert allowed, f"nothing may follow {_text(ids)!r}: {found.get_error()}"
        if END in allowed and (allowed == [END] or chance.random() < 0.5):
            found.reset()
            return _text(ids).decode()
        ids.append(
            chance.choice(_preferred([i for i in allowed if i != END], chance, is_late=place > PATIENCE))
        )
        assert found.consume_token(ids[-1]), _text(ids)
    found.reset()
    return None


def _preferred(allowed: list[int], chance: random.Random, *, is_late: bool) -> list[int]:
    """Prefers printable text, and late in a walk the characters that close strings, lists and objects."""
    closing = [i for i in allowed if i in CLOSING]
    if is_late and closing and chance.random() < 0.7:
        return closing
    printable = [i for i in allowed if 32 <= i < 127 or i >= 256]
    return printable if printable and chance.random() < 0.95 else allowed


def _text(ids: list[int]) -> bytes:
    return b"".join(TABLE.tokens[i] for i in ids)
