"""The compiled attention of a CPU: what the twins compute, and the same whatever a query is computed with."""

from __future__ import annotations

import pytest
import torch

from headway.kernels import QueryBatch, ScoreRule, cpu_attention, cpu_rope_append, has_cpu_attention
from headway.kernels.reference.attention.paged_attention import paged_attention
from headway.kernels.reference.elementwise.rope_append import rope_append

HEADS, KV_HEADS, BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 9, 3, 16, 40, 13
RULE = ScoreRule(0.125)

pytestmark = pytest.mark.skipif(
    not has_cpu_attention(64, 3, RULE), reason="needs Linux, an x86 CPU with AVX2 and a compiler"
)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def caches(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = drawn(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, dim)
    return keys, values


def tables(rows: int) -> torch.Tensor:
    return torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(rows))[
        : rows * MAX_BLOCKS
    ].view(rows, -1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize(("starts", "window"), [((0, 15, 180), 5), ((31,), 1), ((0,), 100), ((3, 40), 17)], ids=str)  # fmt: skip
def test_attention_is_that_of_the_twin(starts: tuple[int, ...], window: int, dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    keys, values = caches(dim)
    query = drawn(len(starts) * window + 2, HEADS + 2, dim)[:, :HEADS]
    table, positions = tables(len(starts)), torch.tensor(starts)
    out = torch.full(query.shape, torch.nan)
    batch = QueryBatch.of_windows(table, positions, window, first_token=1)
    cpu_attention(query, keys, values, batch, RULE, out=out)
    own = query[1:-1].reshape(len(starts), window, HEADS, dim).double()
    wanted = paged_attention(own, keys.double(), values.double(), table, positions, RULE)
    torch.testing.assert_close(out[1:-1].double(), wanted.flatten(0, 1), rtol=1e-5, atol=2e-6)
    assert bool(out[[0, -1]].isnan().all()), "tokens of no batch are not written"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_query_has_the_same_bits_in_any_window_and_beside_any_row(threads: int) -> None:
    torch.set_num_threads(threads)
    keys, values = caches(64)
    query, table = drawn(200, HEADS, 64), tables(1)
    whole = torch.empty_like(query)
    cpu_attention(query, keys, values, QueryBatch.of_windows(table, torch.tensor([0]), 200), RULE, out=whole)
    for window in (1, 3, 64):
        for first in (0, 17, 130):
            found = torch.empty(2 * window, HEADS, 64)
            both = torch.cat([query[-window:], query[first : first + window]])
            starts = torch.tensor([5, first])
            others = torch.cat([table.flip(1), table])
            cpu_attention(both, keys, values, QueryBatch.of_windows(others, starts, window), RULE, out=found)
            assert torch.equal(found[window:], whole[first : first + window]), (window, first)


def test_what_a_query_does_not_see_changes_nothing() -> None:
    keys, values = caches(64)
    query, table, out = drawn(4, HEADS, 64), tables(2), torch.empty(2, 4, HEADS, 64)
    table[0, 2:] = -1
    batch = QueryBatch.of_windows(table[:1], torch.tensor([22]), 4)
    cpu_attention(query, keys, values, batch, RULE, out=out[0])
    own = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    own[table[0, :2]] = True
    own[table[0, 1], 26 - 16 :] = False
    for cache in (keys, values):
        cache[~own] = torch.nan
    cpu_attention(query, keys, values, batch, RULE, out=out[1])
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("heads", [3, 15, 48])
def test_groups_of_every_size_have_the_twins_results_and_their_own_bits(heads: int) -> None:
    keys, values = caches(64)
    query, table = drawn(150, heads, 64), tables(1)
    starts = torch.tensor([40])
    out = torch.empty_like(query)
    cpu_attention(query, keys, values, QueryBatch.of_windows(table, starts, 150), RULE, out=out)
    wanted = paged_attention(query.double()[None], keys.double(), values.double(), table, starts, RULE)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=2e-6)
    for token in (0, 23, 24, 25, 149):
        alone = torch.empty(1, heads, 64)
        batch = QueryBatch.of_windows(table, starts + token, 1)
        cpu_attention(query[token : token + 1], keys, values, batch, RULE, out=alone)
        assert torch.equal(alone[0], out[token])


def test_a_key_that_is_no_number_harms_those_that_see_it_alone() -> None:
    keys, values = caches(64)
    query, table = drawn(100, HEADS, 64), tables(1)
    batch, out = QueryBatch.of_windows(table, torch.tensor([30]), 100), torch.empty(2, 100, HEADS, 64)
    cpu_attention(query, keys, values, batch, RULE, out=out[0])
    keys[table[0, 6], 3] = values[table[0, 6], 3] = torch.nan  # position 99
    cpu_attention(query, keys, values, batch, RULE, out=out[1])
    assert torch.equal(out[0, : 99 - 30], out[1, : 99 - 30])
    assert bool(out[1, 99 - 30 :].isnan().all())


def test_a_query_before_the_first_position_gets_zeros() -> None:
    keys, values = caches(64)
    query, table, rule = drawn(6, HEADS, 64), tables(1), ScoreRule(0.125, first_position=3)
    out, starts = torch.empty_like(query), torch.tensor([0])
    cpu_attention(query, keys, values, QueryBatch.of_windows(table, starts, 6), rule, out=out)
    wanted = paged_attention(query[None], keys, values, table, starts, rule)[0]
    assert bool((out[:3] == 0).all())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rotation_and_slots_are_those_of_the_twin(tokens: int, rotary: int) -> None:
    heads, table = drawn(tokens, HEADS + 2 * KV_HEADS, 64), drawn(100, rotary)
    positions, slots = torch.arange(tokens) * 11 + 5, torch.arange(tokens) * 17 + 3
    slots[-1] = -1 if tokens > 1 else 3
    results = []
    for append in (cpu_rope_append, rope_append):
        own, both = heads.clone(), caches(64)
        query, key, value = own.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        append(query, key, value, positions, table, *both, slots)
        results.append((own, *both))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
