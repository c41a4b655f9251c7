"""Scripts of a FakeEngine that keep to the grammar of each request, as the engine does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import llguidance.numpy

from headway.engine import Submit, TokenTable, compile_matcher, make_tokenizer

CLOSING = b'"}]\n'


def masked_script(
    table: TokenTable, *, seed: int, before: Sequence[int] = (), limit: int = 2000
) -> Callable[[Submit], list[int]]:
    """Returns a script: the ids `before`, which are no part of the grammar's text, then ids drawn from the
    masks up to the end.

    What closes something in JSON is likelier than other bytes. limit: tokens of the grammar's text at most.
    """
    tokenizer = make_tokenizer(table, len(table.tokens))
    closing = {i for i, text in enumerate(table.tokens) if len(text) == 1 and text in CLOSING}

    def script(request: Submit) -> list[int]:
        assert request.grammar is not None
        matcher = compile_matcher(tokenizer, request.grammar.source)
        bits = llguidance.numpy.allocate_token_bitmask(1, len(table.tokens))
        rng = random.Random(f"{seed} {request.request_id}")
        ids: list[int] = []
        while len(ids) < limit and not (ids and ids[-1] in table.end_ids):
            llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
            allowed = [i for i in range(len(table.tokens)) if bits[0, i // 32] >> (i % 32) & 1]
            weights = [20 if i in closing or i in table.end_ids else 1 for i in allowed]
            ids += rng.choices(allowed, weights)
            assert matcher.consume_token(ids[-1]), matcher.get_error()
        return [*before, *ids]

    return script
