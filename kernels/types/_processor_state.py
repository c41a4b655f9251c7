"""The per-row state of logits processors, which change logits before the temperature is applied."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class LogitsProcessorState:
    """Rows at fixed addresses. If `is_used` is false, the rest of the row is undefined.

    A bad word is right-aligned in its line, after entries of -1; a line that ends with -1 has none.
    recent_tokens ends with the last token of the text; entries before the first token are -1.
    """

    is_used: torch.Tensor  # [rows] bool
    penalties: torch.Tensor  # [rows, 3] float32: repetition (1: off), frequency, presence (0: off)
    token_counts: torch.Tensor  # [rows, vocab] int32: occurrences of each token in the output
    is_in_prompt: torch.Tensor  # [rows, vocab] bool
    logit_bias: torch.Tensor  # [rows, vocab] float32; -inf: never allowed
    stop_token_ids: torch.Tensor  # [rows, stops] int64, -1: none
    min_positions: torch.Tensor  # [rows] int64: before this absolute position no stop token is allowed
    bad_words: torch.Tensor  # [rows, words, length] int64
    recent_tokens: torch.Tensor  # [rows, length - 1] int64
    forced_positions: torch.Tensor  # [rows] int64: absolute; -1: no token is forced
    forced_token_ids: torch.Tensor  # [rows] int64: forced there unless the output already has it
    forced_after_ids: torch.Tensor  # [rows] int64: forces only if the output has this token; -1: always

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by the names of their fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def first(self, num_rows: int) -> LogitsProcessorState:
        """Returns views of the first rows."""
        return self.part(slice(num_rows))

    def part(self, rows: slice) -> LogitsProcessorState:
        """Returns views of these rows."""
        return LogitsProcessorState(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def at(
        self,
        index: torch.Tensor,  # [n] int64
    ) -> LogitsProcessorState:
        """Returns copies of these rows."""
        return LogitsProcessorState(**{name: tensor[index] for name, tensor in self.tensors().items()})
