"""What an n-gram drafter promises of one row, in plain lists."""

from __future__ import annotations

from collections.abc import Sequence


def expected_drafts(tokens: Sequence[int], depth: int, max_ngram: int) -> list[int]:
    """tokens: t_0 .. t_L. The drafts for positions L+1 .. L+depth."""
    last = len(tokens) - 1
    for size in range(min(max_ngram, last), 0, -1):
        suffix = tokens[last - size + 1 :]
        for end in range(last - 1, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == suffix:
                longer = list(tokens)
                for _ in range(depth):
                    longer.append(longer[end + 1 + len(longer) - len(tokens)])
                return longer[len(tokens) :]
    return [tokens[-1]] * depth
