"""Requests of every kind at once, come and gone at random: each ends, and none leaves anything behind."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files

import pytest
from headway_testing.local import LocalEngine
from tokenizers import Tokenizer

from headway.engine.batch import Plan
from headway.engine.checkpoint import DtypeName
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop
from headway.engine.mailbox import Abort
from headway.engine.request import FinishReason, SamplingParams
from headway.engine.results import RoundHandle
from headway.engine.runner import Runner

DEMO = files("headway.engine.demo")
STUCK_SECONDS = 30.0
# So many requests are aborted if they last as long: drawn for each, since how many steps one takes depends on how many
# run beside it.
SHARE_ABORTED, MAX_STEPS_TO_ABORT = 0.25, 10


class Noting:
    """A runner that remembers what it launched last."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: Plan | None = None
        self.num_launched = 0

    def launch(self, plan: Plan) -> RoundHandle:
        self._plan = plan
        self.num_launched += 1
        return self._runner.launch(plan)

    def describe(self) -> str:
        plan = self._plan
        if plan is None:
            return "nothing was launched"
        return (
            f"step {self.num_launched}: {len(plan.decode_request_ids)} rows at depth {plan.depth}, adjusted: "
            f"{self._runner.adjustments.is_used}, prefills (start, tokens, scored): "
            f"{[(c.start, len(c.token_ids), len(c.scored_token_ids)) for c in plan.prefill]}"
        )


@contextmanager
def named_if_stuck(runner: Noting) -> Iterator[None]:
    """A step that hangs hangs the test: it is named, with what the host waits for, and the process leaves."""
    is_over = threading.Event()

    def watch() -> None:
        num_launched, since = -1, time.monotonic()
        while not is_over.wait(1.0):
            if runner.num_launched != num_launched:
                num_launched, since = runner.num_launched, time.monotonic()
            elif time.monotonic() - since > STUCK_SECONDS:
                print(f"nothing for {STUCK_SECONDS:g} s after {runner.describe()}", file=sys.__stderr__)
                faulthandler.dump_traceback(sys.__stderr__)
                os._exit(70)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def random_sampling(chance: random.Random) -> SamplingParams:
    fields: dict[str, object] = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {17: 2.0, 300: -100.0}, "bad_words_token_ids": [[40, 41], [52]],
        "allowed_token_ids": list(range(1, 2000)), "min_tokens": 1, "num_logprobs": 3, "num_prompt_logprobs": 1,
    }  # fmt: skip
    return SamplingParams(
        temperature=chance.choice([0.0, 0.0, 0.7, 1.0]),
        seed=chance.getrandbits(63),
        **{name: value for name, value in fields.items() if chance.random() < 0.1},  # type: ignore[arg-type]
    )


def submit_random(engine: LocalEngine, chance: random.Random, texts: Sequence[list[int]]) -> int:
    """Half the prompts share blocks with others."""
    return engine.submit(
        chance.choice(texts)[: chance.randint(1, 250)],
        max_tokens=chance.choice([1, 5, 40, 120]),
        sampling=random_sampling(chance),
        stop_token_ids=chance.choice([[], texts[0][-1:]]),
        max_draft_tokens=chance.choice([0, 1, 2, None, None]),
        cache_salt=chance.choice(["", f"{chance.random()}"]),
    )


def run_crowd(engine: LocalEngine, texts: Sequence[list[int]], *, num_streams: int, num_requests: int) -> int:
    """So many requests, num_streams at a time; returns how many of them were aborted."""
    chance, active, num_steps = random.Random(0), list[int](), 0
    aborted_at = dict[int, int]()  # by request: the step before which it is, if it lasts
    num_aborted = 0
    while active or len(engine.outputs) < num_requests:
        while len(active) < num_streams and len(engine.outputs) < num_requests:
            active.append(submit_random(engine, chance, texts))
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


@pytest.mark.parametrize(
    ("device", "dtype", "num_streams", "num_requests"),
    [
        pytest.param("cpu", "float32", 12, 80, id="cpu"),
        pytest.param(
            "cuda", "bfloat16", 150, 6000, id="cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(580)]
        ),
    ],
)
def test_requests_of_every_kind_end_beside_one_another(
    device: str, dtype: DtypeName, num_streams: int, num_requests: int
) -> None:
    tokenizer = Tokenizer.from_str(DEMO.joinpath("tokenizer.json").read_text())
    prompts = json.loads(DEMO.joinpath("heldout_prompts.json").read_text())
    texts = [tokenizer.encode(entry["text"]).ids for entry in prompts]
    config = EngineConfig(model_path=str(DEMO), device=device, dtype=dtype, depth=3)  # type: ignore[arg-type]
    engine = LocalEngine(config)
    runner, scheduler = engine.engine.runner, engine.engine.scheduler
    runner.capture(range(4), progress=lambda _: None)
    noting = Noting(runner)
    engine.loop = EngineLoop(scheduler, noting, engine.post)
    with named_if_stuck(noting):
        num_aborted = run_crowd(engine, texts, num_streams=num_streams, num_requests=num_requests)
    reasons = {output.finish_reason for output in engine.outputs.values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT}
    assert num_aborted > 0.05 * num_requests
    stats = scheduler.snapshot()
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert stats.num_cached_prompt_tokens > 0
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
