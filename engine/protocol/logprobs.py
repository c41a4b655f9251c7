"""Log-probabilities of sampled or given tokens, as they are sent to the API process: flat arrays, no tensors.

They are those of the raw logits: before penalties, bias, masks and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """The log-probabilities of n tokens. Each token has one entry in `logprobs` and in `ranks`, and num_top
    entries in the two others.

    ranks: 1 is the most probable token of the vocabulary; tokens that tie share the better rank.
    top_ids, top_logprobs: the most probable tokens in falling order, all of the first token, then all of
    the second, ... num_top is smaller than what was asked for only if the vocabulary is.
    """

    num_top: int
    logprobs: list[float] = []
    ranks: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []

    def cut(self, count: int) -> TokenLogprobs:
        """Returns the entries of the first `count` tokens."""
        return self.part(0, count)

    def part(self, start: int, stop: int) -> TokenLogprobs:
        """Returns the entries of tokens [start, stop)."""
        own, top = slice(start, stop), slice(start * self.num_top, stop * self.num_top)
        return TokenLogprobs(
            self.num_top, self.logprobs[own], self.ranks[own], self.top_ids[top], self.top_logprobs[top]
        )


def join(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Concatenates the parts. Without any the result is empty."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        parts[0].num_top if parts else 0,
        [value for part in parts for value in part.logprobs],
        [rank for part in parts for rank in part.ranks],
        [token_id for part in parts for token_id in part.top_ids],
        [value for part in parts for value in part.top_logprobs],
    )


def unpack(rows: Sequence[Sequence[float]], num_top: int) -> TokenLogprobs:
    """Unpacks rows of one token each: its log-probability, its rank, the ids of the top tokens and their
    log-probabilities.

    A row may hold more top tokens than are wanted, or fewer if the vocabulary is smaller.
    """
    width = (len(rows[0]) - 2) // 2 if rows else num_top
    num_top = min(num_top, width)
    return TokenLogprobs(
        num_top,
        [row[0] for row in rows],
        [int(row[1]) for row in rows],
        [int(token_id) for row in rows for token_id in row[2 : 2 + num_top]],
        [value for row in rows for value in row[2 + width : 2 + width + num_top]],
    )
