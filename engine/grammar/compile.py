"""Compiles grammars with llguidance, under limits of their size and compile time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.grammar import TokenTable

# Within these limits the lexer of a hostile grammar is built in less than a second. They bound each later
# step, too. A state of a lexer with 100 terminals takes 1.7 kB: 34 MB for all, which texts of one source
# share.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    precompute_large_lexemes=True,
    verbose_errors=False,
)


class _Bytes:
    """The tokenizer that LLTokenizer takes from Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        missing = vocab_size - len(table.tokens)
        self.tokens: Sequence[bytes] = [*table.tokens[:vocab_size], *[b""] * missing]
        self.special_token_ids = table.special_ids
        self.eos_token_id = table.end_ids[0]
        self._id_of_byte = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the text as tokens of one byte, since masks do not depend on the tokenization."""
        data = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte[byte] for byte in data if byte in self._id_of_byte]


def make_tokenizer(table: TokenTable, vocab_size: int) -> LLTokenizer:
    """Returns the tokenizer that grammars are compiled for, which takes some 0.7 s for a vocabulary of
    152,064 tokens. vocab_size: the width of the logits; ids beyond the table are never allowed."""
    ends = [token_id for token_id in table.end_ids if token_id < vocab_size]
    tokenizer = cast(TokenizerWrapper, _Bytes(table, vocab_size))  # the library reads only the attributes
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)


def json_schema_source(schema: str) -> str:
    """Returns the source of a JSON schema, which is given as JSON. Raises RequestError unless it is a JSON
    object."""
    try:
        return str(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        raise RequestError(f"the JSON schema cannot be read: {error}", code="invalid_grammar") from error


def regex_source(pattern: str) -> str:
    """Returns the source of a regular expression that the whole text matches."""
    return str(LLMatcher.grammar_from_regex(pattern))


def lark_source(grammar: str) -> str:
    """Returns the source of a Lark grammar in llguidance's dialect."""
    return str(LLMatcher.grammar_from_lark(grammar))


def make_grammar_check(table: TokenTable, vocab_size: int) -> Callable[[str], None]:
    """Returns a function that compiles a source as the engine will, and raises RequestError where it would
    fail.

    It may be called from several threads.
    """
    tokenizer = make_tokenizer(table, vocab_size)

    def check(source: str) -> None:
        matcher = compile_matcher(tokenizer, source)
        allowed = _first_allowed(matcher.compute_bitmask())
        if allowed is not None and not matcher.is_error():
            matcher.consume_token(allowed)  # a lexer may be too large for its first step only
        if matcher.is_error():
            raise RequestError(
                f"the grammar cannot be enforced: {matcher.get_error()}", code="invalid_grammar"
            )
        if allowed is None:
            raise RequestError("the grammar allows no text", code="invalid_grammar")

    return check


def _first_allowed(mask: bytes) -> int | None:
    """Returns the least id that the mask allows; None for none. mask: 8 ids a byte, the lowest bit first."""
    place = next((i for i, byte in enumerate(mask) if byte), None)
    return None if place is None else 8 * place + (mask[place] & -mask[place]).bit_length() - 1


def compile_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher at the beginning of the grammar. source: see `Grammar`. The GIL is released while it
    is built.

    Raises RequestError with the reason of the library, which names the keyword and the place.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise RequestError(f"the grammar cannot be enforced: {matcher.get_error()}", code="invalid_grammar")
    return matcher
