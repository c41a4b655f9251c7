"""The state of logits processors by row: penalties, bias and masks.

It takes 9 bytes for each row and token of the vocabulary: 87 MiB for 64 rows of 152,064 tokens. Graphs need
fixed addresses, so that it is allocated at the start on CUDA, and for the first request that needs it on a
CPU. Rows without processors are never touched, and no kernel runs while no row has any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS
from headway.engine.scheduling.plan import TokenHistory
from headway.engine.state.transfer import to_device
from headway.kernels import LogitsProcessorState


class LogitsProcessorTable:
    """Mutable: written by the runner at admission, and by rounds through `first`."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._used: set[int] = set()
        self._table = _allocate(num_rows, vocab_size, device) if device.type == "cuda" else None

    @property
    def is_used(self) -> bool:
        return bool(self._used)

    def first(self, num_rows: int) -> LogitsProcessorState:
        """Returns the first rows, in the table's own memory."""
        return self._all().first(num_rows)

    def at(
        self,
        index: torch.Tensor,  # [n] int64
    ) -> LogitsProcessorState:
        """Returns a copy of these rows."""
        return self._all().at(index)

    def count(
        self,
        index: torch.Tensor,  # [n] int64
        tokens: torch.Tensor,  # [n] int64: one more token of the output of each of these rows
    ) -> None:
        if not self._used:
            return
        table = self._all()
        is_used = table.is_used[index].to(torch.int32)
        table.token_counts.index_put_((index, tokens), is_used, accumulate=True)
        table.recent_tokens[index] = torch.cat([table.recent_tokens[index, 1:], tokens[:, None]], 1)

    def set_up(self, row: int, sampling: SamplingParams, history: TokenHistory) -> None:
        """Sets up the whole row, so that nothing of its previous request is left."""
        table = self._all()
        output = self._ids(history.output_token_ids)
        table.penalties[row] = self._floats(
            [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]
        )
        table.token_counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        table.is_in_prompt[row].zero_().index_fill_(0, self._ids(history.prompt_token_ids), True)
        self._set_bias(table.logit_bias[row], sampling)
        table.stop_token_ids[row] = self._ids(_to_the_right(history.stop_token_ids, MAX_STOP_TOKEN_IDS))
        table.min_positions[row].fill_(len(history.prompt_token_ids) + sampling.min_tokens)
        self._set_bad_words(table.bad_words[row], sampling)
        width = MAX_BAD_WORD_TOKENS - 1
        recent = [*history.prompt_token_ids[-width:], *history.output_token_ids[-width:]][-width:]
        table.recent_tokens[row] = self._ids(_to_the_right(recent, width))
        budget = sampling.thinking_budget
        position = -1 if budget is None else len(history.prompt_token_ids) + budget.num_tokens
        table.forced_positions[row].fill_(position)
        table.forced_token_ids[row].fill_(0 if budget is None else budget.end_id)
        opener = None if budget is None else budget.start_id
        table.forced_after_ids[row].fill_(-1 if opener is None else opener)
        table.is_used[row].fill_(True)
        self._used.add(row)

    def move(self, source: int, target: int) -> None:
        """Moves row `source` to row `target`, which is free."""
        if source in self._used:
            for tensor in self._all().tensors().values():
                tensor[target] = tensor[source]
            self._used.add(target)
            self.release(source)

    def release(self, row: int) -> None:
        if row in self._used:
            self._all().is_used[row].fill_(False)
            self._used.discard(row)

    def _all(self) -> LogitsProcessorState:
        if self._table is None:
            self._table = _allocate(*self._shape, self._device)
        return self._table

    def _set_bias(self, bias: torch.Tensor, sampling: SamplingParams) -> None:
        """bias: [vocab] float32. Bad words of one token, and tokens that are not allowed, get -inf."""
        bias.zero_()
        bias[self._ids(list(sampling.logit_bias))] = self._floats(list(sampling.logit_bias.values()))
        if sampling.allowed_token_ids is not None:
            is_forbidden = torch.ones(len(bias), dtype=torch.bool, device=self._device)
            is_forbidden.index_fill_(0, self._ids(sampling.allowed_token_ids), False)
            bias.masked_fill_(is_forbidden, -torch.inf)
        single = [words[0] for words in sampling.bad_words_token_ids if len(words) == 1]
        bias.index_fill_(0, self._ids(single), -torch.inf)

    def _set_bad_words(self, bad_words: torch.Tensor, sampling: SamplingParams) -> None:
        """bad_words: [words, length] int64. Those of one token are in the bias."""
        longer = [words for words in sampling.bad_words_token_ids if len(words) > 1]
        bad_words.fill_(-1)
        if longer:
            bad_words[: len(longer)] = self._ids([_to_the_right(ids, MAX_BAD_WORD_TOKENS) for ids in longer])

    def _ids(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(token_ids, self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return to_device(values, self._device, torch.float32)


def table_bytes(num_rows: int, vocab_size: int) -> int:
    """Counts, presence and bias; all else is small."""
    return num_rows * vocab_size * 9


def _allocate(num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessorState:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

    return LogitsProcessorState(
        is_used=zeros(dtype=torch.bool),
        penalties=zeros(3, dtype=torch.float32),
        token_counts=zeros(vocab_size, dtype=torch.int32),
        is_in_prompt=zeros(vocab_size, dtype=torch.bool),
        logit_bias=zeros(vocab_size, dtype=torch.float32),
        stop_token_ids=zeros(MAX_STOP_TOKEN_IDS, dtype=torch.int64) - 1,
        min_positions=zeros(dtype=torch.int64),
        bad_words=zeros(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, dtype=torch.int64) - 1,
        recent_tokens=zeros(MAX_BAD_WORD_TOKENS - 1, dtype=torch.int64) - 1,
        forced_positions=zeros(dtype=torch.int64) - 1,
        forced_token_ids=zeros(dtype=torch.int64),
        forced_after_ids=zeros(dtype=torch.int64) - 1,
    )


def _to_the_right(token_ids: Sequence[int], width: int) -> list[int]:
    """-1 before them."""
    return [-1] * (width - len(token_ids)) + list(token_ids)
