"""Sampling under speculation follows the target's distribution, whatever the drafter's is.

A Markov chain stands in for the model, so that the law of every token and pair is known exactly. Each of
100,000 rows is one trial with its own seed; the real round, sampler and verification run on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from headway.engine.execution.step import StepContext, run_step
from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.speculation.mtp import BLOCK_HIDDEN, PENDING_HIDDEN, MtpDrafter
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import BlockSpec, RowSpec

VOCAB = 8
DEPTH = 3
START = 2  # the token before the first sampled one
POSITION = 5  # its position
NUM_TRIALS = 100_000
NUM_TOKENS = 5
ALPHA = 1e-4
Trials = tuple[torch.Tensor, list[torch.Tensor], float]
COMMIT = sys.modules["headway.kernels.reference.speculation.verify_and_rewind"]


class MarkovHead:
    """Its drafts depend on the last token only."""

    num_layers = 1
    taps = ()
    draft_ids = None

    def __init__(self, law: torch.Tensor) -> None:
        self.law = law  # [VOCAB, VOCAB]

    def mask(self) -> None:
        """Drafts one after the other."""

    def draft_hidden(self, states: TargetStates) -> torch.Tensor:
        return states.last

    def draft(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> torch.Tensor:
        return one_hot(inputs)

    def logits(self, carry: torch.Tensor, index: int = 0) -> torch.Tensor:
        return carry @ self.law


def one_hot(inputs: ForwardInputs) -> torch.Tensor:
    return torch.nn.functional.one_hot(inputs.token_ids, VOCAB).float()


class MarkovChain:
    """A model whose next token depends on the last one only; the MTP head has a law of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.target = torch.randn(VOCAB, VOCAB, generator=generator)
        self.draft_head = MarkovHead(0.5 * self.target + torch.randn(VOCAB, VOCAB, generator=generator))

    def forward(self, inputs: ForwardInputs, pool: StatePool, taps: Sequence[int]) -> TargetStates:
        return TargetStates(one_hot(inputs))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.target

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, pool: StatePool) -> None:
        """Keeps nothing."""

    def transitions(self, temperature: float, top_p: float) -> torch.Tensor:
        """[VOCAB, VOCAB] float64: the law of the next token by the last one."""
        p = (self.target.double() / temperature).softmax(-1)
        ordered, ids = p.sort(-1, descending=True)
        kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
        return torch.zeros_like(p).scatter(1, ids, kept / kept.sum(-1, keepdim=True))


def new_rows(
    num_rows: int, first_seed: int, temperature: float, top_p: float
) -> tuple[RowTensors, StatePool]:
    """Rows that stand at POSITION with START as the last token and one pending pair."""
    cpu = torch.device("cpu")
    rows = RowTensors.allocate(num_rows, max_blocks=1, max_pending=DEPTH + 1, device=cpu)
    rows.last_tokens.fill_(START)
    rows.pending_tokens[:, 0] = START
    rows.pending_counts.fill_(1)
    rows.kv_lengths.fill_(POSITION)
    rows.limits.fill_(16)
    rows.depth_caps.fill_(DEPTH)
    rows.last_block_offsets.fill_(POSITION - 1)
    rows.block_counts.fill_(1)
    rows.last_block_ids.fill_(0)
    rows.kv_block_ids.fill_(0)
    rows.granted_block_ids.fill_(0)
    rows.temperatures.fill_(temperature)
    rows.top_p.fill_(top_p)
    rows.seeds.copy_(torch.arange(first_seed, first_seed + num_rows))
    kept = (
        BlockSpec(BLOCK_HIDDEN, (VOCAB,), torch.float32),
        RowSpec(PENDING_HIDDEN, (DEPTH + 1, VOCAB), torch.float32, is_scratch=True),
    )
    pool = StatePool((), kept, num_blocks=1, num_rows=num_rows, block_size=16, device=cpu)
    return rows, pool


def run(temperature: float, top_p: float, first_seed: int = 0) -> Trials:
    """NUM_TRIALS rows to NUM_TOKENS tokens each.

    Returns the tokens [trials, NUM_TOKENS + 1] with START first; for each place of the window the pairs
    (token before, token) [n, 2] emitted there; and the share of drafts accepted.
    """
    model = MarkovChain()
    rows, pool = new_rows(NUM_TRIALS, first_seed, temperature, top_p)
    drafter = MtpDrafter(model.draft_head, pool, rows, max_depth=DEPTH)  # type: ignore[arg-type]
    context = StepContext(model, pool, drafter)  # type: ignore[arg-type]
    tokens = torch.full((NUM_TRIALS, NUM_TOKENS + 1 + DEPTH + 1), -1)
    tokens[:, 0] = START
    counts = torch.zeros(NUM_TRIALS, dtype=torch.int64)
    by_place: list[list[torch.Tensor]] = [[] for _ in range(DEPTH + 1)]
    accepted = rounds = 0
    while int(counts.min()) < NUM_TOKENS:
        rows.limits.copy_(torch.where(counts < NUM_TOKENS, 16, 0))
        outcome = run_step(context, rows, DEPTH).round
        assert outcome is not None
        emitted = outcome.emitted
        accepted += int((emitted[:, 0] - 1).clamp(min=0).sum())
        rounds += int((emitted[:, 0] > 0).sum())
        for place in range(DEPTH + 1):
            chosen = (emitted[:, 0] > place).nonzero()[:, 0]
            at = counts[chosen] + place + 1
            tokens[chosen, at] = emitted[chosen, 1 + place]
            by_place[place].append(torch.stack([tokens[chosen, at - 1], tokens[chosen, at]], 1))
        counts += emitted[:, 0]
    return tokens[:, : NUM_TOKENS + 1], [torch.cat(p) for p in by_place], accepted / (rounds * DEPTH)


run_once = cache(run)  # for what nobody breaks


def p_value(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square of counts against a law; cells that are expected under five times are merged into one."""
    expected = probabilities / probabilities.sum() * observed.sum()
    assert int(observed[probabilities == 0].sum()) == 0, "a token outside the filters was sampled"
    is_small = expected < 5
    cells = [(o, e) for o, e in zip(observed[~is_small].tolist(), expected[~is_small].tolist(), strict=True)]
    if float(expected[is_small].sum()) >= 5:
        cells.append((float(observed[is_small].sum()), float(expected[is_small].sum())))
    total = sum(e for _, e in cells)
    share = sum(o for o, _ in cells) / total
    return float(chisquare([o for o, _ in cells], [e * share for _, e in cells]).pvalue)


def pair_counts(pairs: torch.Tensor) -> torch.Tensor:
    return torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


def p_values(
    temperature: float, top_p: float, first_seed: int = 0, run: Callable[..., Trials] = run_once
) -> Iterator[tuple[str, float]]:
    """Every claim with its p-value: each token, each pair of neighbours, each place of the window."""
    tokens, by_place, _ = run(temperature, top_p, first_seed)
    transitions = MarkovChain().transitions(temperature, top_p)
    law = torch.nn.functional.one_hot(torch.tensor(START), VOCAB).double()
    for i in range(1, NUM_TOKENS + 1):
        pair_law = law[:, None] * transitions
        law = law @ transitions
        yield f"token {i}", p_value(torch.bincount(tokens[:, i], minlength=VOCAB), law)
        yield (
            f"pair {i - 1}, {i}",
            p_value(pair_counts(tokens[:, i - 1 : i + 1]).flatten(), pair_law.flatten()),
        )
    for place, pairs in enumerate(by_place):
        counts = pair_counts(pairs)
        for before in range(VOCAB):
            if int(counts[before].sum()) >= 1000:
                yield f"place {place} after {before}", p_value(counts[before], transitions[before])


LONG = [pytest.param(temperature, 1.0, marks=pytest.mark.long) for temperature in (0.5, 1.5)]
SETTINGS = [(1.0, 1.0), (1.0, 0.7), *LONG]


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS, ids=str)
def test_tokens_and_pairs_follow_the_targets_law_at_every_place(temperature: float, top_p: float) -> None:
    results = dict(p_values(temperature, top_p))
    assert {name.split()[1] for name in results if name.startswith("place")} == {"0", "1", "2", "3"}
    failed = {name: p for name, p in results.items() if p < ALPHA / len(results) * 10}
    assert not failed


@pytest.mark.slow
def test_distant_seeds_follow_it_too() -> None:
    assert min(p for _, p in p_values(1.0, 1.0, first_seed=-(1 << 62))) > ALPHA


def test_the_drafters_law_is_unlike_the_targets() -> None:
    """Else the tests above would not see a draft that was accepted wrongly."""
    _, _, acceptance = run_once(1.0, 1.0, 0)
    assert 0.2 < acceptance < 0.6
    model = MarkovChain()
    distance = (model.draft_head.law.softmax(-1) - model.target.softmax(-1)).abs().sum(-1) / 2
    assert float(distance.mean()) > 0.2


def test_two_seeds_that_follow_one_another_are_independent() -> None:
    tokens, _, _ = run_once(1.0, 1.0, 0)
    law = MarkovChain().transitions(1.0, 1.0)[START]
    neighbours = torch.stack([tokens[0::2, 1], tokens[1::2, 1]], 1)
    assert p_value(pair_counts(neighbours).flatten(), (law[:, None] * law).flatten()) > ALPHA


def accept_all(
    input_tokens: torch.Tensor, output_tokens: torch.Tensor, num_decode: int, num_prefill: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = input_tokens.flatten()
    last = torch.arange(num_decode) * (depth + 1) + depth
    return last, torch.ones_like(flat, dtype=torch.bool), flat


def ignore_the_first_mismatch(
    input_tokens: torch.Tensor, output_tokens: torch.Tensor, num_decode: int, num_prefill: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts matches instead of consecutive matches."""
    flat = input_tokens.flatten()
    window = flat.view(num_decode, depth + 1)
    matches = (window[:, 1:] == output_tokens.view(num_decode, depth + 1)[:, :-1]).sum(-1)
    places = torch.arange(depth + 1)
    mask = places <= matches[:, None]
    return torch.arange(num_decode) * (depth + 1) + matches, mask.flatten(), flat


@pytest.mark.parametrize("broken", [accept_all, ignore_the_first_mismatch], ids=lambda f: f.__name__)
def test_broken_verification_is_seen(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.setattr(COMMIT, "verify_speculative_tokens", broken)
    assert min(p for _, p in p_values(1.0, 1.0, run=run)) < 1e-12
