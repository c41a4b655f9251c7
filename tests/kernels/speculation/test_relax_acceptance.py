"""relax_acceptance against a row-by-row statement of what it promises, in double precision."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headway.kernels import relax_acceptance

START, END = 3, 4
# Of a probability in float32, beside the same in double precision.
TOLERANCE = 1e-5


def probable(line: list[float], draft: int, top_k: int, max_gap: float) -> bool | None:
    """None: so near to the limit that rounding may decide."""
    if any(math.isnan(value) or value == math.inf for value in line) or line[draft] == -math.inf:
        return False
    best = max(line)
    total = sum(math.exp(value - best) for value in line)
    gap = (1 - math.exp(line[draft] - best)) / total
    if sum(value > line[draft] for value in line) >= top_k:
        return False
    return None if 0 < abs(gap - max_gap) < TOLERANCE and gap > 0 else gap <= max_gap


def phase_after(phase: int, token: int) -> int:
    return int(token != END) if phase == 1 else int(phase == 2 and token == START)


def relaxed(
    sampled: list[int],
    logits: list[list[float]],
    tokens: list[int],
    is_valid: list[bool],
    phase: int,
    top_k: int,
    max_gap: float,
) -> tuple[list[int], int] | None:
    """What was sampled and the phase; None where rounding may decide."""
    result = list(sampled)
    if not is_valid[0]:
        return result, phase
    phase = phase_after(phase, tokens[0])
    for place in range(1, len(tokens)):
        if not is_valid[place]:
            break
        draft = tokens[place]
        if phase == 1:
            is_probable = probable(logits[place - 1], draft, top_k, max_gap)
            if is_probable is None:
                return None
            if is_probable:
                result[place - 1] = draft
        if result[place - 1] != draft:
            break
        phase = phase_after(phase, draft)
    return result, phase


def random_rows(
    draw: random.Random, num_rows: int, depth: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """sampled, logits, tokens, is_valid and phases. Drafts are mostly probable ones; some rows are padding,
    some logits equal, -inf or NaN."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    shape = num_rows, depth + 1
    logits = torch.randn((*shape, vocab), generator=generator) * draw.choice([0.5, 2.0, 5.0])
    if draw.random() < 0.3:
        logits = logits.round()
    for _ in range(num_rows // 4):
        cell = draw.randrange(num_rows), draw.randrange(depth + 1), draw.randrange(vocab)
        logits[cell] = draw.choice([-math.inf, math.nan, math.inf])
    sampled = torch.randint(0, vocab, shape, generator=generator)
    likely = logits.nan_to_num().topk(4).indices
    choice = torch.randint(0, 4, (*shape, 1), generator=generator)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    tokens[:, 1:] = likely.gather(2, choice)[:, :-1, 0]
    agrees = torch.rand(shape, generator=generator) < 0.3
    sampled[:, :-1] = torch.where(agrees[:, :-1], tokens[:, 1:], sampled[:, :-1])
    tokens[torch.rand(shape, generator=generator) < 0.1] = END
    tokens[torch.rand(shape, generator=generator) < 0.1] = START
    counts = torch.randint(0, depth + 2, (num_rows,), generator=generator)
    counts[torch.rand(num_rows, generator=generator) < 0.6] = depth + 1
    is_valid = torch.arange(depth + 1) < counts[:, None]
    phases = torch.randint(0, 3, (num_rows,), generator=generator)
    return sampled, logits, tokens, is_valid, phases


@pytest.mark.parametrize(
    "windows", [300, pytest.param(10_000, marks=pytest.mark.interpreted_long)], ids=["some", "many"]
)
def test_random_windows(windows: int, device: torch.device) -> None:
    draw, undecided, changed, seen = random.Random(windows), 0, 0, 0
    while seen < windows:
        num_rows, depth = draw.choice([1, 7, 40]), draw.randint(0, 8)
        vocab, top_k = draw.choice([5, 33, 64]), draw.choice([1, 2, 3, 50])
        max_gap = draw.choice([0.0, 0.05, 0.3, 1.0])
        sampled, logits, tokens, is_valid, phases = random_rows(draw, num_rows, depth, vocab)
        num_lines = num_rows + 3
        ids = torch.randperm(num_lines, generator=torch.Generator().manual_seed(seen))[:num_rows]
        spans = torch.tensor([7, START, END]).repeat(num_lines, 1)
        spans[ids, 0] = phases
        logits = logits.to(draw.choice([torch.float32, torch.float64, torch.bfloat16]))
        result, lines = sampled.clone().to(device), spans.clone().to(device)
        relax_acceptance(
            result, logits.to(device), tokens.to(device), is_valid.to(device), ids.to(device), lines, top_k, max_gap
        )  # fmt: skip
        for row in range(num_rows):
            expected = relaxed(
                sampled[row].tolist(), logits[row].double().tolist(), tokens[row].tolist(), is_valid[row].tolist(),
                int(phases[row]), top_k, max_gap,
            )  # fmt: skip
            if expected is None:
                undecided += 1
                continue
            assert (result[row].tolist(), int(lines[ids[row], 0])) == expected
            changed += expected[0] != sampled[row].tolist()
        others = torch.ones(num_lines, dtype=torch.bool).index_fill_(0, ids, False)
        assert lines[:, 1:].tolist() == [[START, END]] * num_lines
        assert lines.cpu()[others, 0].tolist() == [7] * 3
        seen += num_rows
    assert changed > seen / 20
    assert undecided < seen / 100


@pytest.mark.parametrize("vocab", [4095, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_vocabulary_of_several_blocks(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """The best token stands in the last block, the drafts anywhere; rows of a wider tensor."""
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.randn((6, 3, vocab + 5), generator=generator).to(dtype)
    wide[:, :, vocab - 1] = 12
    logits = wide[:, :, :vocab]
    tokens = torch.randint(5, vocab - 1, (6, 3), generator=generator)
    logits.scatter_(2, tokens[:, 1:, None], torch.tensor([11.5, 11.875, 1.0]).to(dtype).repeat(2)[:, None, None].expand(6, 2, 1))  # fmt: skip
    sampled = torch.full((6, 3), vocab - 1)
    given = (logits.to(device), tokens.to(device), torch.ones((6, 3), dtype=torch.bool, device=device))
    spans = torch.tensor([[1, START, END]]).repeat(6, 1).to(device)
    found = set()
    for top_k, max_gap in ((2, 0.2), (1, 1.0), (2, 0.02), (2, 0.3)):
        result = sampled.clone().to(device)
        relax_acceptance(result, *given, torch.arange(6, device=device), spans.clone(), top_k, max_gap)
        for row in range(6):
            line = logits[row].double().tolist(), tokens[row].tolist(), [True] * 3
            assert (result[row].tolist(), 1) == relaxed(sampled[row].tolist(), *line, 1, top_k, max_gap)
            found.add((top_k, max_gap, row % 3, bool(result[row, 0] != vocab - 1)))
    assert {
        (2, 0.2, 0, False),
        (2, 0.2, 1, True),
        (1, 1.0, 1, False),
        (2, 0.02, 1, False),
        (2, 0.3, 0, True),
        (2, 0.3, 2, False),
    } <= found


def test_the_worked_example(device: torch.device) -> None:
    probabilities = torch.full((1, 4, 10), 1e-6)
    for place, (draft, share, best) in enumerate([(6, 0.4, 0.5), (9, 0.3, 0.4), (7, 0.6, 0.8)]):
        probabilities[0, place, draft], probabilities[0, place, 1] = share, best
    sampled = torch.tensor([[8, 9, 4, 3]], device=device)
    spans = torch.tensor([[1, -1, 9]], device=device)
    relax_acceptance(
        sampled,
        probabilities.log().to(device),
        torch.tensor([[5, 6, 9, 7]], device=device),
        torch.ones((1, 4), dtype=torch.bool, device=device),
        torch.tensor([0], device=device),
        spans,
        2,
        0.2,
    )
    assert sampled.tolist() == [[6, 9, 4, 3]]
    assert spans.tolist() == [[0, -1, 9]]


def test_no_rows(device: torch.device) -> None:
    none = torch.zeros((0, 3), dtype=torch.int64, device=device)
    relax_acceptance(none, none[:, :, None].float(), none, none.bool(), none[:, 0], none, 2, 0.5)
