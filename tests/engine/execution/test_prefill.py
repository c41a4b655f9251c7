"""How chunks of prompts become batches of queries of one forward pass, and for how many tokens there are
graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headway.engine.execution.prefill import prefill_inputs
from headway.engine.execution.step_key import StepGrid, StepKey, mixed_token_counts, token_counts
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.scheduling.prefill_policy import MAX_MIXED_KEYS, PrefillPolicy
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import QueryBatch, splits_keys
from headway.kernels.attention.dispatch import AttentionKernel, AttentionShape, choose

BLOCK_SIZE, MAX_BLOCKS = 16, 1024


def batches_of(
    chunks: Sequence[tuple[int, int]],
    *,
    gqa_group_size: int = 1,
    block_size: int = BLOCK_SIZE,
) -> tuple[QueryBatch, ...]:
    """chunks: (first position, tokens), a row each."""
    cpu = torch.device("cpu")
    rows = RowTensors.allocate(len(chunks), max_blocks=MAX_BLOCKS, max_pending=1, device=cpu)
    rows.granted_block_ids.copy_(torch.arange(len(chunks) * MAX_BLOCKS).view(-1, MAX_BLOCKS))
    made = [
        PrefillChunk(row, row, start, (0,) * length, hidden_block_id=None, is_last=True)
        for row, (start, length) in enumerate(chunks)
    ]
    tokens = prefill_inputs(made, rows, block_size, gqa_group_sizes=[gqa_group_size])
    return tokens.inputs.batches


def size_of(batch: QueryBatch) -> tuple[int, int]:
    """(rows, queries of each)."""
    assert isinstance(batch.lengths, int)
    assert len(batch.block_table) == len(batch.start_positions)
    assert batch.num_tokens == len(batch.block_table) * batch.lengths
    return len(batch.block_table), batch.lengths


def queries_of(batches: Sequence[QueryBatch]) -> list[tuple[int, int, int]]:
    """(place in the flat list, position, the row's first block) of each, in the order of the batches."""
    return [
        (
            batch.first_token + row * window + w,
            int(batch.start_positions[row]) + w,
            int(batch.block_table[row, 0]),
        )
        for batch in batches
        for rows, window in [size_of(batch)]
        for row in range(rows)
        for w in range(window)
    ]


def kernel_of(batch: QueryBatch, gqa_group_size: int) -> AttentionKernel:
    return choose(AttentionShape(size_of(batch)[1], gqa_group_size, batch.most_cached))


@pytest.mark.parametrize("most", [1, 16, 40, 512, 700, 1024, 8192])
def test_graphs_are_for_ever_more_tokens_as_far_as_steps_go(most: int) -> None:
    """Alone up to 1,024, beside a round up to 640."""
    for counts, limit in ((token_counts(most), 1024), (mixed_token_counts(most), 384)):
        assert list(counts) == sorted(set(counts))
        assert counts[-1] <= min(most, limit)
    assert (token_counts(8192)[-1], mixed_token_counts(8192)[-1]) == (1024, 384)


@pytest.mark.parametrize("depths", [(0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("max_rows", [5, 40, 130])
def test_steps_are_captured_at_the_start(depths: tuple[int, ...], max_rows: int) -> None:
    """Every pass of prompts, every plain round, and every mixed pass that the policy plans; none twice."""
    grid = StepGrid.of(max_rows, 1024, 384)
    policy = PrefillPolicy.uniform(512, mixed_above_tokens=8)
    captured = grid.captured(depths, policy, catches_up=True)
    assert len(set(captured)) == len(captured)
    for lengths in ([1], [32], [33], [1, 1], [513], [700, 300], [1024]):
        assert grid.prompts(chunks_of(lengths)) in captured
    for num_rows in range(1, max_rows + 1):
        assert grid.catch_up(num_rows) in captured
        for depth in depths:
            assert grid.round(StepKey(num_rows, depth)) in captured
            wanted, num_tokens = StepKey(num_rows, depth), num_rows * (depth + 1)
            for length in range(1, policy.mixed_with(num_tokens) + 1, 37):
                if num_tokens > 8:
                    assert grid.mixed(wanted, chunks_of([length])) in captured


def test_mixed_passes_of_all_depths_have_few_sizes() -> None:
    """They decide how long a start takes."""
    grid, policy = StepGrid.of(256, 1024, 384), PrefillPolicy.uniform(512, mixed_above_tokens=8)
    assert len(grid.captured(range(4), policy, catches_up=True)) <= 155
    assert grid.mixed(StepKey(130, 0), chunks_of([20])) == StepKey(192, 0, 128)
    assert grid.mixed(StepKey(9, 0), chunks_of([20])) == StepKey(64, 0, 128)
    assert grid.mixed(StepKey(9, 3), chunks_of([20])) == StepKey(16, 3, 128)
    assert grid.mixed(StepKey(3, 3), chunks_of([20])) == StepKey(16, 3, 128)
    assert grid.mixed(StepKey(65, 1), chunks_of([300])) == StepKey(96, 1, 384)


def test_catching_up_takes_every_second_size() -> None:
    grid = StepGrid.of(40)
    keys = sorted({grid.catch_up(n) for n in range(1, 41)})
    assert keys == [StepKey(n, catches_up=True) for n in (2, 8, 24, 40)]
    assert StepGrid.of(1).catch_up(1) == StepKey(1, catches_up=True)


def test_what_no_padded_step_holds_has_no_key() -> None:
    grid = StepGrid((1, 4), (16, 64), (32,))
    far = PrefillChunk(0, 0, 9000, (1,) * 8, hidden_block_id=None, is_last=True)
    assert grid.prompts(chunks_of([65])) is None
    assert grid.prompts(chunks_of([1] * 65)) is None
    assert grid.prompts([far, *chunks_of([1])]) is None
    assert grid.prompts([far]) == StepKey(num_prompt_tokens=16, is_window=True), "as a decode window"
    assert grid.mixed(StepKey(3, 2), chunks_of([33])) is None
    assert grid.mixed(StepKey(3, 2), [far]) is None
    assert grid.mixed(StepKey(3, 2), chunks_of([20])) == StepKey(4, 2, 32)
    assert StepGrid.of(4).prompts(chunks_of([1])) is None, "prompts are not padded"
    assert StepGrid.of(4).mixed(StepKey(3, 2), chunks_of([1])) is None


def chunks_of(lengths: Sequence[int]) -> list[PrefillChunk]:
    return [PrefillChunk(0, 0, 0, (1,) * n, hidden_block_id=None, is_last=True) for n in lengths]


def test_mixed_passes_take_no_chunk_whose_keys_are_split() -> None:
    assert not splits_keys(MAX_MIXED_KEYS)
    assert splits_keys(MAX_MIXED_KEYS + 1)


def test_neighbours_of_equal_length_share_a_batch() -> None:
    batches = batches_of([(0, 30), (5, 30), (0, 31)])
    assert [size_of(batch) for batch in batches] == [(2, 30), (1, 31)]


def test_neighbours_with_few_and_with_many_cached_keys_share_none() -> None:
    batches = batches_of([(8192, 20), (100, 20), (8193, 20), (9000, 20)])
    assert [(len(batch.block_table), batch.most_cached) for batch in batches] == [(2, 8192), (2, 9000)]
    assert [kernel_of(batch, 1) for batch in batches] == [AttentionKernel.PREFILL, AttentionKernel.SPLIT_KV]


@pytest.mark.parametrize(("block_size", "most"), [(16, 256), (32, 256), (64, 128)])
@pytest.mark.parametrize("length", [1, 20, 32])
def test_many_rows_of_split_kv_are_cut_into_batches_whose_partial_results_are_small(
    length: int, block_size: int, most: int
) -> None:
    """Split-KV leaves partial results for each query and 2,048 places of the table: 64 questions of 20 tokens
    about one long text once took 340 MB."""
    batches = batches_of([(10_000, length)] * 64, gqa_group_size=4, block_size=block_size)
    assert all(batch.num_tokens <= most for batch in batches)
    assert {kernel_of(batch, 4) for batch in batches} == {AttentionKernel.SPLIT_KV}
    assert len(batches) == -(-64 // (most // length))
    expected = [(row * length + w, 10_000 + w, row * MAX_BLOCKS) for row in range(64) for w in range(length)]
    assert queries_of(batches) == expected


@pytest.mark.parametrize(("start", "length"), [(10_000, 33), (10_000, 300), (100, 20)])
def test_many_rows_stay_together_where_no_partial_results_are_left(start: int, length: int) -> None:
    """The window is too wide for split-KV, or few keys are cached."""
    (batch,) = batches_of([(start, length)] * 64, gqa_group_size=4)
    assert size_of(batch) == (64, length)
    assert kernel_of(batch, 4) is AttentionKernel.PREFILL
