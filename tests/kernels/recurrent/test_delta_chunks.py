"""delta_chunks computes prompts as transformers' chunked form does, and generated tokens as rounds do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from headway_testing.delta_nets import (
    Sizes,
    empty_state,
    expected,
    rule_of,
    run_chunks,
    run_windows,
    tokens_of,
)

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
SIZES = [Sizes(), Sizes(3, 3, 16, 16), Sizes(1, 2, 128, 64)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_prompts_give_what_transformers_gives(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Three prompts in one pass, among tokens of none; one goes on from a state."""
    rule, lengths = rule_of(sizes, device), (130, 1, 64)
    mixed, gates = tokens_of(sizes, sum(lengths) + 3, device, dtype)
    states = empty_state(sizes, 4, 1, device).states
    states[2] = 0.1 * torch.randn(states[2].shape, generator=torch.Generator().manual_seed(2)).to(device)
    before, spans, first = states.clone(), [], 2
    for row, length in zip((1, 2, 0), lengths, strict=True):
        spans.append((row, first, length, False))
        first += length
    out = run_chunks(mixed, gates, rule, states, [*spans, (0, 0, 0, False)])
    on_cpu = rule._replace(decay_log=rule.decay_log.cpu(), decay_bias=rule.decay_bias.cpu())
    for row, start, length, _ in spans:
        tokens = slice(start, start + length)
        wanted, last = expected(
            mixed[tokens].cpu(), gates[tokens].cpu(), on_cpu, before[row].cpu(), in_pieces=True
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[tokens].float().cpu(), wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states[row].cpu(), last, rtol=tolerance, atol=tolerance)
    assert torch.equal(states[3], before[3])
    assert not out[:2].any()
    assert not out[-1:].any()


@pytest.mark.parametrize("cuts", [(64, 128), (128,), (64,), (64, 128, 192)], ids=str)
def test_no_bit_depends_on_where_a_prompt_is_cut(cuts: tuple[int, ...], device: torch.device) -> None:
    sizes, length = Sizes(1, 2, 16, 16), 200
    rule = rule_of(sizes, device)
    mixed, gates = tokens_of(sizes, length, device)
    whole, states = (empty_state(sizes, 2, 1, device).states for _ in range(2))
    wanted = run_chunks(mixed, gates, rule, whole, [(1, 0, length, False)])
    bounds, parts = [0, *cuts, length], []
    for start, end in pairwise(bounds):
        part = run_chunks(mixed[start:end], gates[start:end], rule, states, [(1, 0, end - start, False)])
        parts.append(part)
    assert torch.equal(torch.cat(parts), wanted)
    assert torch.equal(states, whole)


def test_no_bit_depends_on_other_prompts_nor_on_what_follows(device: torch.device) -> None:
    sizes = Sizes(1, 2, 16, 16)
    rule = rule_of(sizes, device)
    mixed, gates = tokens_of(sizes, 150, device)
    together = empty_state(sizes, 3, 1, device).states
    spans = [(0, 0, 70, False), (2, 70, 9, True), (1, 79, 71, False)]
    out = run_chunks(mixed, gates, rule, together, spans, [2, 0, 1])
    for row, first, length, is_generated in spans:
        alone, tokens = empty_state(sizes, 1, 1, device).states, slice(first, first + length)
        result = run_chunks(mixed[tokens], gates[tokens], rule, alone, [(0, 0, length, is_generated)])
        assert torch.equal(result, out[tokens])
        assert torch.equal(alone[0], together[[2, 0, 1][row]])
    shorter = empty_state(sizes, 1, 1, device).states
    result = run_chunks(mixed[:67], gates[:67], rule, shorter, [(0, 0, 67, False)])
    assert torch.equal(result, out[:67])


def test_generated_tokens_have_the_bits_of_rounds(device: torch.device) -> None:
    sizes, count = Sizes(2, 4, 16, 16), 12
    rule = rule_of(sizes, device)
    mixed, gates = tokens_of(sizes, count, device)
    states = empty_state(sizes, 2, 1, device).states
    again = run_chunks(mixed, gates, rule, states, [(1, 0, count, True)])
    state, width = empty_state(sizes, 2, 3, device), 3
    for first in range(0, count, width):
        tokens = slice(first, first + width)
        assert torch.equal(run_windows(mixed[tokens], gates[tokens], rule, state, [1]), again[tokens])
        state.counts[1] = width
    run_windows(mixed[:1], gates[:1], rule, state, [1])
    assert torch.equal(state.states, states)
