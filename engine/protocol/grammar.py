"""Values of structured output that cross the process border: the vocabulary as bytes, and the grammar of a
request."""

from __future__ import annotations

import msgspec


class TokenTable(msgspec.Struct, frozen=True):
    """The vocabulary of a tokenizer as bytes, by token id.

    tokens: what each token adds to a text; empty for ids that stand for nothing. special_ids: control tokens,
    which no text of a grammar matches. end_ids: those of them that end the model's text; at least one.
    """

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]


class Thinking(msgspec.Struct, frozen=True):
    """The token ids at which a model's reasoning begins and ends. The grammar governs what follows it.

    end_ids: the sequence that closes the reasoning, at least one. is_open: the prompt has opened it.
    start_id: the token by which the model may open it itself as its first one; None: it may not.
    """

    end_ids: list[int]
    is_open: bool
    start_id: int | None = None


class Grammar(msgspec.Struct, frozen=True):
    """The grammar that the text of a request must match.

    source: a grammar in llguidance's own form, as `LLMatcher.grammar_from_json_schema` and its siblings
    return it. thinking: None where the grammar governs the text from its first token on.
    """

    source: str
    thinking: Thinking | None = None
