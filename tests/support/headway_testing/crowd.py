"""Requests of every kind at once, come and gone at random, before an engine in the test's own process."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headway.engine.protocol.messages import Abort
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway_testing.local import LocalEngine

# This share of requests is aborted after a drawn number of steps, if they last as long: how many
# steps one takes depends on how many run at the same time.
SHARE_ABORTED, MAX_STEPS_TO_ABORT = 0.25, 10
# Requests of every kind and plain ones take turns; number of requests of each stream in a turn.
PHASE_OF_STREAMS = 6


def random_sampling(chance: random.Random, *, is_plain: bool) -> SamplingParams:
    """Draws sampling parameters. is_plain: without logits processors and log-probabilities, so that prompts
    may share the forward pass of a round."""
    fields: dict[str, object] = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {17: 2.0, 300: -100.0}, "bad_words_token_ids": [[40, 41], [52]],
        "allowed_token_ids": list(range(1, 2000)), "min_tokens": 1, "num_logprobs": 3, "num_prompt_logprobs": 1,
    }  # fmt: skip
    plain = {"top_p", "top_k", "min_p", "num_prompt_logprobs"}
    chosen = [name for name in fields if chance.random() < 0.1 and (name in plain or not is_plain)]
    return SamplingParams(
        temperature=chance.choice([0.0, 0.0, 0.7, 1.0]),
        seed=chance.getrandbits(63),
        **{name: fields[name] for name in chosen},  # type: ignore[arg-type]
    )


def submit_random(
    engine: LocalEngine,
    chance: random.Random,
    texts: Sequence[list[int]],
    output_lens: Sequence[int],
    *,
    is_plain: bool,
) -> int:
    """Submits a random request. Half the prompts share blocks with others."""
    return engine.submit(
        chance.choice(texts)[: chance.randint(1, 250)],
        max_tokens=chance.choice(output_lens),
        sampling=random_sampling(chance, is_plain=is_plain),
        stop_token_ids=chance.choice([[], texts[0][-1:]]),
        max_draft_tokens=chance.choice([0, 1, 2, None, None]),
        cache_salt=chance.choice(["", f"{chance.random()}"]),
    )


def run_crowd(
    engine: LocalEngine,
    texts: Sequence[list[int]],
    *,
    num_streams: int,
    num_requests: int,
    output_lens: Sequence[int] = (1, 5, 40, 120),
) -> int:
    """Runs the same requests each time, num_streams at once, on an engine that has none. Returns how many
    were aborted."""
    assert not engine.outputs, f"{len(engine.outputs)} requests were there before"
    chance, active, num_steps = random.Random(0), list[int](), 0
    aborted_at = dict[int, int]()  # by request: the step before which it is, if it lasts
    num_aborted = 0
    while active or len(engine.outputs) < num_requests:
        while len(active) < num_streams and len(engine.outputs) < num_requests:
            is_plain = len(engine.outputs) // (PHASE_OF_STREAMS * num_streams) % 2 == 1
            active.append(submit_random(engine, chance, texts, output_lens, is_plain=is_plain))
            if chance.random() < SHARE_ABORTED:
                aborted_at[active[-1]] = num_steps + chance.randint(0, MAX_STEPS_TO_ABORT)
        for request_id in active:
            if aborted_at.get(request_id) == num_steps:
                engine.post.inbox.append(Abort(request_id))
                engine.outputs[request_id].finish_reason = FinishReason.ABORT
                num_aborted += 1
        engine.step()
        num_steps += 1
        active = [i for i in active if engine.outputs[i].finish_reason is None]
    engine.step()
    return num_aborted
