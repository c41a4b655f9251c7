"""delta_windows steps through windows as transformers steps through one sequence, whatever was drafted and
rejected."""

from __future__ import annotations

import random

import pytest
import torch
from headway_testing.delta_nets import Sizes, empty_state, expected, rule_of, run_windows, tokens_of

from headway.kernels import DeltaRule, DeltaState

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SIZES = [Sizes(), Sizes(3, 3, 8, 16), Sizes(1, 2, 128, 64)]


def write_text(
    texts: list[tuple[torch.Tensor, torch.Tensor]],
    rule: DeltaRule,
    state: DeltaState,
    ids: list[int],
    widths: list[int],
    chance: random.Random,
) -> list[torch.Tensor]:
    """Runs rounds of these widths over rows, each with a text of its own; tokens after a random place are
    wrong and do not stay. Returns the results of each row's tokens."""
    places, found = [0] * len(texts), [[] for _ in texts]
    for width in widths:
        kept = [
            min(chance.randint(1, width), len(text[0]) - place)
            for text, place in zip(texts, places, strict=True)
        ]
        windows = []
        for (mixed, gates), place, count in zip(texts, places, kept, strict=True):
            right = mixed[place : place + count], gates[place : place + count]
            wrong = mixed[:1].expand(width - count, -1) + 1, gates[:1].expand(width - count, -1) - 1
            windows.append([torch.cat(both) for both in zip(right, wrong, strict=True)])
        joined = [torch.cat(column) for column in zip(*windows, strict=True)]
        results = run_windows(joined[0], joined[1], rule, state, ids).unflatten(0, (len(ids), width))
        for row, count in enumerate(kept):
            found[row].append(results[row, :count])
            places[row] += count
            state.counts[ids[row]] = count
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_windows_give_what_transformers_gives_one_after_the_other(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, is_interpreted: bool
) -> None:
    rule, num_rounds = rule_of(sizes, device), 4 if is_interpreted else 12
    texts = [tokens_of(sizes, 5 * num_rounds, device, dtype, seed=seed) for seed in (3, 4)]
    state = empty_state(sizes, 4, 5, device, dtype)
    chance = random.Random(0)
    found = write_text(texts, rule, state, [2, 0], [chance.randint(1, 5) for _ in range(num_rounds)], chance)
    for (mixed, gates), result in zip(texts, found, strict=True):
        count = len(result)
        wanted, _ = expected(mixed[:count].cpu(), gates[:count].cpu(), _on_cpu(rule), in_pieces=False)
        torch.testing.assert_close(result.float().cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _on_cpu(rule: DeltaRule) -> DeltaRule:
    return rule._replace(decay_log=rule.decay_log.cpu(), decay_bias=rule.decay_bias.cpu())


def test_no_bit_depends_on_how_tokens_are_spread_over_windows(
    device: torch.device, is_interpreted: bool
) -> None:
    sizes = Sizes(2, 4, 16, 16)
    rule, count = rule_of(sizes, device), 9 if is_interpreted else 40
    text = tokens_of(sizes, count, device)
    results = []
    for widths in ([1] * count, [5] * count, [1, 2, 3, 4, 5] * count):
        state = empty_state(sizes, 2, 5, device)
        found = write_text([text], rule, state, [1], widths[: count // 2], random.Random(len(widths)))[0]
        results.append(found)
    shortest = min(map(len, results))
    assert all(torch.equal(result[:shortest], results[0][:shortest]) for result in results)


def test_no_bit_of_a_row_depends_on_the_others(device: torch.device, is_interpreted: bool) -> None:
    sizes, width = Sizes(2, 4, 16, 16), 3
    rule, rows = rule_of(sizes, device), 3 if is_interpreted else 9
    mixed, gates = tokens_of(sizes, rows * width, device)
    before = empty_state(sizes, rows, width, device)
    before.states.copy_(torch.randn(before.states.shape, generator=torch.Generator().manual_seed(0)))
    before.mixed.copy_(torch.randn(before.mixed.shape, generator=torch.Generator().manual_seed(1)))
    before.counts.copy_(torch.arange(rows) % (width + 1))
    together, ids = DeltaState(*(tensor.clone() for tensor in before)), list(range(rows))[::-1]
    results = run_windows(mixed, gates, rule, together, ids).unflatten(0, (rows, width))
    for row, state_id in enumerate(ids):
        alone, tokens = (
            DeltaState(*(tensor.clone() for tensor in before)),
            slice(row * width, (row + 1) * width),
        )
        result = run_windows(mixed[tokens], gates[tokens], rule, alone, [state_id])
        assert torch.equal(result, results[row])
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[state_id], all_rows[state_id])


def test_only_named_rows_change_and_states_only_by_what_has_stayed(device: torch.device) -> None:
    sizes = Sizes(1, 2, 8, 16)
    rule = rule_of(sizes, device)
    mixed, gates = tokens_of(sizes, 4, device)
    state = empty_state(sizes, 4, 3, device)
    state.states.fill_(0.5)
    state.counts.copy_(torch.tensor([0, 2, 1, 3]))
    before = DeltaState(*(tensor.clone() for tensor in state))
    run_windows(mixed, gates, rule, state, [0, 1])
    for changed, kept in zip(state, before, strict=True):
        assert torch.equal(changed[2:], kept[2:])
    assert torch.equal(state.states[0], before.states[0])
    assert not torch.equal(state.states[1], before.states[1])
    assert torch.equal(state.counts, before.counts)
    assert torch.equal(state.mixed[:2, :2].flatten(0, 1), mixed[:, rule.query_size :])
    assert torch.equal(state.gates[:2, :2].flatten(0, 1), gates)
    assert torch.equal(state.mixed[:, 2:], before.mixed[:, 2:])


def test_no_rows(device: torch.device) -> None:
    sizes = Sizes(1, 2, 8, 16)
    state = empty_state(sizes, 1, 2, device)
    mixed, gates = tokens_of(sizes, 0, device)
    assert run_windows(mixed, gates, rule_of(sizes, device), state, []).shape == (0, 2, 16)
