"""choose_experts against a plain loop over a token's logits."""

from __future__ import annotations

import math

import pytest
import torch

from headway.kernels import ExpertRule, choose_experts


def by_hand(logits: list[float], rule: ExpertRule) -> tuple[list[int], list[float]]:
    routed = logits[:-1] if rule.has_shared else logits
    highest = max(routed)
    chances = [math.exp(logit - highest) for logit in routed]
    ids = sorted(range(len(routed)), key=lambda expert: (-routed[expert], expert))[: rule.top_k]
    total = sum(chances[expert] for expert in ids) if rule.normalises else sum(chances)
    weights = [chances[expert] / total for expert in ids]
    if rule.has_shared:
        return [*ids, len(routed)], [*weights, 1 / (1 + math.exp(-logits[-1]))]
    return ids, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (8, ExpertRule(2)),
        (60, ExpertRule(4, normalises=False)),
        (256, ExpertRule(8, has_shared=True)),
        (512, ExpertRule(10, has_shared=True)),
        (3, ExpertRule(3)),
    ],
)
def test_the_most_probable_are_chosen(
    experts: int, rule: ExpertRule, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(7, experts + rule.has_shared + 3, generator=generator).to(dtype)
    logits = logits[:, : experts + rule.has_shared]  # rows with gaps between them
    ids, weights = choose_experts(logits.to(device), rule)
    assert ids.dtype == torch.int32
    for row, found, shares in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected_ids, expected = by_hand(row, rule)
        assert found == expected_ids
        assert shares == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2**-7)
    assert torch.equal(weights, weights.to(dtype).float()), "weights have the precision of logits"


def test_equal_logits_go_to_lower_experts(device: torch.device) -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, 0.5, 2.0, 0.5]], device=device)
    assert choose_experts(logits, ExpertRule(5)).ids.tolist() == [[1, 2, 4, 0, 3]]


def test_padding_chooses_nobody(device: torch.device) -> None:
    logits = torch.randn(3, 9, device=device)
    ids = choose_experts(logits, ExpertRule(2, has_shared=True), torch.tensor([5, -1, 0], device=device)).ids
    assert ids[1].tolist() == [-1, -1, -1]
    assert bool((ids[[0, 2]] >= 0).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_logits_choose_experts_that_exist(broken: float, device: torch.device) -> None:
    logits = torch.full((2, 6), broken, device=device)
    logits[1, 2] = 1.0
    ids = choose_experts(logits, ExpertRule(4)).ids
    assert bool(((ids >= 0) & (ids < 6)).all())
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    logits = torch.randn(33, 128, generator=torch.Generator().manual_seed(0)).to(device)
    together = choose_experts(logits, ExpertRule(8))
    for tokens in (1, 2, 8, 17):
        alone = choose_experts(logits[:tokens].contiguous(), ExpertRule(8))
        assert torch.equal(alone.ids, together.ids[:tokens])
        assert torch.equal(alone.weights, together.weights[:tokens])
