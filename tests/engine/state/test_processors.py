"""The table beside the rows: set up whole, moved, released, and taken only when it is needed."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from headway.engine.protocol.sampling_params import SamplingParams, ThinkingBudget
from headway.engine.scheduling.limits import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS
from headway.engine.scheduling.plan import TokenHistory
from headway.engine.state.processors import LogitsProcessorTable

VOCAB = 20
CPU = torch.device("cpu")
HISTORY = TokenHistory((3, 4, 3), (5, 5, 6), (7, 8))


def table_with(row: int = 1, history: TokenHistory = HISTORY, **fields: object) -> LogitsProcessorTable:
    table = LogitsProcessorTable(4, VOCAB, CPU)
    table.set_up(row, msgspec.structs.replace(SamplingParams(), **fields), history)
    return table


def contents(table: LogitsProcessorTable, row: int) -> dict[str, list[object]]:
    return {name: tensor[row].clone().tolist() for name, tensor in table.first(4).tensors().items()}


def test_counts_and_presence_come_from_output_and_prompt() -> None:
    row = contents(table_with(), 1)
    assert [i for i, seen in enumerate(row["is_in_prompt"]) if seen] == [3, 4]
    assert {i: n for i, n in enumerate(row["token_counts"]) if n} == {5: 2, 6: 1}
    assert row["recent_tokens"][-6:] == [3, 4, 3, 5, 5, 6]
    assert set(row["recent_tokens"][:-6]) == {-1}


def test_long_texts_leave_their_last_tokens() -> None:
    history = TokenHistory(tuple(range(10)), tuple(range(10, 19)), ())
    row = contents(table_with(history=history), 1)
    assert row["recent_tokens"] == list(range(19))[-(MAX_BAD_WORD_TOKENS - 1) :]


def test_stop_tokens_are_masked_from_the_prompt_on() -> None:
    row = contents(table_with(min_tokens=4), 1)
    assert row["min_positions"] == 3 + 4
    assert row["stop_token_ids"] == [-1] * (MAX_STOP_TOKEN_IDS - 2) + [7, 8]


def test_a_thinking_budget_is_counted_from_the_end_of_the_prompt() -> None:
    row = contents(table_with(thinking_budget=ThinkingBudget(4, 9)), 1)
    assert (row["forced_positions"], row["forced_token_ids"], row["forced_after_ids"]) == (3 + 4, 9, -1)
    assert contents(table_with(thinking_budget=ThinkingBudget(4, 9, 8)), 1)["forced_after_ids"] == 8
    assert contents(table_with(min_tokens=4), 1)["forced_positions"] == -1


def test_what_is_never_allowed_is_minus_infinity_whatever_its_bias() -> None:
    bias = contents(
        table_with(
            logit_bias={1: 2.0, 2: 3.0, 9: 9.0},
            allowed_token_ids=[1, 2, 4],
            bad_words_token_ids=[[2], [4, 1], [1, 1, 4]],
        ),
        1,
    )["logit_bias"]
    assert bias == [{1: 2.0, 4: 0.0}.get(token, -math.inf) for token in range(VOCAB)]


def test_bad_words_of_several_tokens_stand_at_the_right() -> None:
    words = contents(table_with(bad_words_token_ids=[[2], [4, 1], [1, 1, 4]]), 1)["bad_words"]
    assert words[0] == [-1] * (MAX_BAD_WORD_TOKENS - 2) + [4, 1]
    assert words[1] == [-1] * (MAX_BAD_WORD_TOKENS - 3) + [1, 1, 4]
    assert {token for line in words[2:] for token in line} == {-1}


def test_a_row_keeps_nothing_of_who_had_it_before() -> None:
    everything = {
        "logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2], "bad_words_token_ids": [[1, 2]], "min_tokens": 3,
        "repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0,
        "thinking_budget": ThinkingBudget(4, 9, 8),
    }  # fmt: skip
    used = table_with(**everything)
    used.release(1)
    empty = TokenHistory((1,), (), ())
    used.set_up(1, SamplingParams(min_tokens=1), empty)
    assert contents(used, 1) == contents(table_with(history=empty, min_tokens=1), 1)


def test_a_move_takes_the_whole_row_along() -> None:
    table = table_with(row=3, presence_penalty=1.0)
    before = contents(table, 3)
    table.move(3, 0)
    assert contents(table, 0) == before
    assert contents(table, 3)["is_used"] is False
    assert table.is_used
    table.release(0)
    assert not table.is_used


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_only_the_row_itself_changes(row: int) -> None:
    table = table_with(row=row)
    for other in {0, 1, 2, 3} - {row}:
        assert contents(table, other) == contents(LogitsProcessorTable(4, VOCAB, CPU), other)


def test_the_first_token_counts_in_rows_that_use_the_table() -> None:
    table = table_with(row=1)
    table.count(torch.tensor([2, 1]), torch.tensor([9, 5]))
    assert contents(table, 1)["token_counts"][5] == 3
    assert contents(table, 1)["recent_tokens"][-3:] == [5, 6, 5]
    assert set(contents(table, 2)["token_counts"]) == {0}


def test_nothing_is_allocated_on_the_cpu_before_it_is_used() -> None:
    """1 EiB could not be."""
    table = LogitsProcessorTable(1 << 30, 1 << 30, CPU)
    table.release(5)
    table.move(7, 6)
    table.count(torch.tensor([0]), torch.tensor([0]))
    assert not table.is_used
