"""What an n-gram drafter promises of one row, in plain lists."""

from __future__ import annotations

from collections.abc import Sequence


def expected_drafts(tokens: Sequence[int], depth: int, max_ngram: int) -> list[int]:
    """Returns the drafts for positions L+1 .. L+depth. tokens: t_0 .. t_L."""
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


def predicted_drafts(
    tokens: Sequence[int],
    start: int,
    predicted: Sequence[int],
    depth: int,
    max_ngram: int,
    predicted_ngram: int,
) -> list[int]:
    """Returns the drafts of a row whose own text begins at position `start` and has this prediction."""
    last = len(tokens) - 1

    def common(text: Sequence[int], end: int, most: int) -> int:
        size = 0
        while size < min(most, end + 1, last + 1) and text[end - size] == tokens[last - size]:
            size += 1
        return size

    sizes = [common(predicted, end, predicted_ngram) for end in range(len(predicted) - 1)]
    longest = max(sizes, default=0)
    own = max((common(tokens, end, max_ngram) for end in range(last)), default=0)
    if longest == 0 or longest < own:
        return expected_drafts(tokens, depth, max_ngram)
    ends = [end for end, size in enumerate(sizes) if size == longest]
    end = min(ends, key=lambda end: (abs(end - (last - start)), -end))
    return [predicted[min(end + 1 + i, len(predicted) - 1)] for i in range(depth)]
