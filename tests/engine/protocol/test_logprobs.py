"""Log-probabilities: scored on the device, packed into one tensor, unpacked, cut and joined."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from headway.engine.protocol.logprobs import TokenLogprobs, join, unpack
from headway.engine.protocol.messages import RoundOutput, TokenEvent
from headway.engine.sampling.sampler import SCORED_AT_ONCE, score_tokens

THREE = TokenLogprobs(
    2, [-1.0, -2.0, -3.0], [1, 2, 3], [1, 2, 3, 4, 5, 6], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 20, 50], ids=["below-the-top", "as-large", "larger"])
def test_scores_are_those_of_a_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    count = SCORED_AT_ONCE + 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab_size, generator=generator).to(dtype)
    tokens = torch.randint(vocab_size, (count,), generator=generator)
    scores = unpack(score_tokens(logits, tokens).tolist(), 20)
    num_top = min(20, vocab_size)
    assert scores.num_top == num_top
    for place, token in enumerate(tokens.tolist()):
        line = logits[place].double()
        expected = (line - line.logsumexp(0)).tolist()
        assert scores.logprobs[place] == pytest.approx(expected[token], abs=1e-5)
        assert scores.ranks[place] == 1 + int((line > line[token]).sum())
        top = slice(place * num_top, (place + 1) * num_top)
        assert scores.top_logprobs[top] == pytest.approx(sorted(expected, reverse=True)[:num_top], abs=1e-5)
        own = [expected[token_id] for token_id in scores.top_ids[top]]
        assert own == pytest.approx(scores.top_logprobs[top], abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [19, 32_001, 151_643, 32_000])
def test_a_line_has_the_same_scores_at_any_place(vocab_size: int) -> None:
    """Of an odd vocabulary every fourth line begins at a multiple of 16 bytes."""
    lines = torch.randn(8, vocab_size, device="cuda")
    tokens = torch.arange(8, device="cuda")
    expected = score_tokens(lines, tokens)
    for shift in range(1, 8):
        places = (torch.arange(8, device="cuda") + shift) % 8
        assert torch.equal(score_tokens(lines[places], tokens[places]), expected[places]), shift


def test_tokens_that_tie_share_the_better_rank() -> None:
    scores = unpack(
        score_tokens(torch.tensor([[1.0, 2.0, 1.0, 1.0]]).repeat(3, 1), torch.tensor([0, 3, 1])).tolist(), 0
    )
    assert scores.ranks == [2, 2, 1]


def test_large_ids_survive_the_packing() -> None:
    logits = torch.zeros(1, 300_001)
    logits[0, 300_000] = 5.0
    scores = unpack(score_tokens(logits, torch.tensor([299_999])).tolist(), 1)
    assert (scores.top_ids, scores.ranks) == ([300_000], [2])


def test_impossible_tokens_are_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -math.inf]])
    assert unpack(score_tokens(logits, torch.tensor([1])).tolist(), 2).logprobs == [-math.inf]


@pytest.mark.parametrize("num_top", [0, 1, 3, 5])
def test_only_what_was_asked_for_is_unpacked(num_top: int) -> None:
    row = [-0.5, 2.0, 7.0, 8.0, 9.0, -0.1, -0.2, -0.3]
    scores = unpack([row, row], num_top)
    kept = min(num_top, 3)
    assert scores.top_ids == [7, 8, 9][:kept] * 2
    assert scores.top_logprobs == [-0.1, -0.2, -0.3][:kept] * 2
    assert scores.num_top == kept


def test_no_tokens_give_empty_scores() -> None:
    assert unpack([], 4) == TokenLogprobs(4)
    assert join([]) == TokenLogprobs(0)


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_parts_join_to_the_whole(count: int) -> None:
    tail = TokenLogprobs(
        2,
        THREE.logprobs[count:],
        THREE.ranks[count:],
        THREE.top_ids[2 * count :],
        THREE.top_logprobs[2 * count :],
    )
    assert join([THREE.cut(count), tail]) == THREE


def test_they_cross_the_border_between_the_processes() -> None:
    sent = RoundOutput([TokenEvent(3, [1, 2, 3], logprobs=THREE, prompt_logprobs=THREE.cut(1))])
    decoder = msgspec.msgpack.Decoder(RoundOutput)
    assert decoder.decode(msgspec.msgpack.encode(sent)) == sent
