"""The queries of one launch of attention, and which keys each of them sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """Rows of queries in a flat list of tokens: windows of a decode round, or chunks of prompts, one row
    each.

    The batch has the tokens [first_token, first_token + num_tokens) of the list. Query w of row r is at
    position start_positions[r] + w and sees the keys of the blocks block_table[r] up to that position.

    lengths is a number where all rows have the same number of queries: row r begins at first_token + r *
    lengths. It is a tensor where only the device knows which rows exist (a captured graph of prompt chunks):
    row r begins at first_token + first_tokens[r], a row of length 0 does not exist, and the tokens of no row
    are padding.

    most_cached is the host's upper bound of start_positions. It is None if the host does not know one, or if
    the queries must be computed by the kernels of decode rounds.
    """

    block_table: torch.Tensor  # [rows, max_blocks] int32 or int64; -1 where no block is granted
    start_positions: torch.Tensor  # [rows] int64
    lengths: int | torch.Tensor  # queries of each row; a tensor is [rows] int64
    num_tokens: int
    first_token: int = 0
    first_tokens: torch.Tensor | None = None  # [rows] int64, required if lengths is a tensor
    end_positions: torch.Tensor | None = (
        None  # [rows] int64: a row has no keys at or after it; None: after the row's queries
    )
    most_cached: int | None = None

    @classmethod
    def of_windows(
        cls,
        block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64
        start_positions: torch.Tensor,  # [rows] int64
        window: int,
        *,
        first_token: int = 0,
        end_positions: torch.Tensor | None = None,  # [rows] int64
        most_cached: int | None = None,
    ) -> QueryBatch:
        """Returns rows of `window` queries each."""
        sizes = window, len(block_table) * window, first_token
        return cls(block_table, start_positions, *sizes, end_positions=end_positions, most_cached=most_cached)

    @classmethod
    def of_chunks(
        cls,
        block_table: torch.Tensor,  # [chunks, max_blocks] int32 or int64
        start_positions: torch.Tensor,  # [chunks] int64
        lengths: torch.Tensor,  # [chunks] int64
        first_tokens: torch.Tensor,  # [chunks] int64
        num_tokens: int,
    ) -> QueryBatch:
        """Returns a row for each chunk, whose lengths only the device knows."""
        return cls(block_table, start_positions, lengths, num_tokens, first_tokens=first_tokens)

    @property
    def tokens(self) -> slice:
        """Returns the batch's part of the list."""
        return slice(self.first_token, self.first_token + self.num_tokens)

    def after(self, count: int) -> QueryBatch:
        """Returns the same batch in a list that has `count` more tokens before the batch."""
        return replace(self, first_token=self.first_token + count)
