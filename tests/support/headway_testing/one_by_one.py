"""An oracle without rounds: one token at a time, the whole text through the model again for each.

Every rule of sampling is stated once more in plain Python; of the kernels only the noise is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.kernels.reference.sampling.sample import gumbel_noise
from headway_testing.exactness import logits_after

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Ask:
    """One request as a test states it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    max_draft_tokens: int | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    raw_logits: list[list[float]] = field(default_factory=list)  # before each token
    finish_reason: FinishReason = FinishReason.LENGTH


def answer(model: CausalLM, ask: Ask) -> Answer:
    result = Answer()
    while len(result.token_ids) < ask.max_tokens:
        raw = logits_after(model, [*ask.prompt, *result.token_ids]).tolist()
        token_id = pick(raw, ask, result.token_ids)
        result.raw_logits.append(raw)
        result.token_ids.append(token_id)
        if token_id in ask.stop_token_ids:
            result.finish_reason = FinishReason.STOP
            break
    return result


def prompt_logits(model: CausalLM, prompt: Sequence[int]) -> list[list[float]]:
    """Returns the logits before each token of the prompt but the first."""
    return [logits_after(model, prompt[:end]).tolist() for end in range(1, len(prompt))]


def pick(raw: list[float], ask: Ask, output: list[int]) -> int:
    sampling = ask.sampling
    logits = adjusted(raw, ask, output)
    if sampling.temperature == 0:
        return logits.index(max(logits))
    scaled = [value / sampling.temperature for value in logits]
    kept = keep_probable(keep_top_k(scaled, sampling.top_k), sampling.top_p, sampling.min_p)
    seed = torch.tensor([sampling.seed if sampling.seed < 1 << 63 else sampling.seed - (1 << 64)])
    noise = gumbel_noise(seed, torch.tensor([len(ask.prompt) + len(output)]), len(raw))[0].tolist()
    scores = [value + gumbel for value, gumbel in zip(kept, noise, strict=True)]
    return scores.index(max(scores))


def adjusted(raw: list[float], ask: Ask, output: list[int]) -> list[float]:
    sampling, text = ask.sampling, [*ask.prompt, *output]
    logits = list(raw)
    for token_id in set(text):
        value = logits[token_id]
        penalty = sampling.repetition_penalty
        logits[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(output):
        logits[token_id] -= output.count(token_id) * sampling.frequency_penalty + sampling.presence_penalty
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    banned = {words[-1] for words in sampling.bad_words_token_ids if ends_with(text, words[:-1])}
    if sampling.allowed_token_ids is not None:
        banned |= set(range(len(raw))) - set(sampling.allowed_token_ids)
    if len(output) < sampling.min_tokens:
        banned |= set(ask.stop_token_ids)
    budget = sampling.thinking_budget
    is_due = budget is not None and len(output) == budget.num_tokens and budget.end_id not in output
    if budget is not None and is_due and (budget.start_id is None or budget.start_id in output):
        return [0.0 if token_id == budget.end_id else -math.inf for token_id in range(len(raw))]
    return [-math.inf if token_id in banned else value for token_id, value in enumerate(logits)]


def ends_with(text: list[int], end: list[int]) -> bool:
    return not end or text[-len(end) :] == end


def keep_top_k(scaled: list[float], top_k: int) -> list[float]:
    if top_k == 0:
        return scaled
    lowest = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
    return [value if value >= lowest else -math.inf for value in scaled]


def keep_probable(scaled: list[float], top_p: float, min_p: float) -> list[float]:
    total = log_sum(scaled)
    shares = [math.exp(value - total) for value in scaled]
    floor = min_p * max(shares)
    if top_p < 1:
        before, last_kept = 0.0, 0.0
        for share in sorted(shares, reverse=True):
            if before >= top_p:
                break
            before, last_kept = before + share, share
        floor = max(floor, last_kept)
    return [value if share >= floor else -math.inf for value, share in zip(scaled, shares, strict=True)]


def log_sum(values: list[float]) -> float:
    highest = max(values)
    return highest + math.log(sum(math.exp(value - highest) for value in values))


def assert_scores(
    scores: TokenLogprobs | None, token_ids: Sequence[int], raw_logits: list[list[float]], num_top: int | None
) -> None:
    """Asserts that log-probabilities are those of the raw logits: of each token, its rank, and the most
    probable ones."""
    if num_top is None:
        assert scores is None or scores.logprobs == []
        return
    assert scores is not None
    assert [len(scores.logprobs), len(scores.ranks)] == [len(token_ids)] * 2
    assert [len(scores.top_ids), len(scores.top_logprobs)] == [len(token_ids) * num_top] * 2
    for place, (token_id, raw) in enumerate(zip(token_ids, raw_logits, strict=True)):
        total = log_sum(raw)
        ordered = sorted(raw, reverse=True)
        assert abs(scores.logprobs[place] - (raw[token_id] - total)) < TOLERANCE
        assert ordered[scores.ranks[place] - 1] - raw[token_id] < TOLERANCE
        top = slice(place * num_top, (place + 1) * num_top)
        for rank, (top_id, value) in enumerate(
            zip(scores.top_ids[top], scores.top_logprobs[top], strict=True)
        ):
            assert abs(value - (ordered[rank] - total)) < TOLERANCE
            assert abs(value - (raw[top_id] - total)) < TOLERANCE
