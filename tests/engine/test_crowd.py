"""Requests of every kind at once, come and gone at random: each ends, and none leaves anything behind."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import pytest
from headway_testing.crowd import run_crowd
from headway_testing.local import LocalEngine

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.execution.results import StepHandle
from headway.engine.execution.runner import Runner
from headway.engine.loading.headers import DtypeName
from headway.engine.loop import EngineLoop
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan

DEMO = files("headway.engine.demo")
STUCK_SECONDS = 30.0
OUTPUT_LENS = (1, 5, 40, 120)


class Noting:
    """A runner that remembers what it launched last."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: Plan | None = None
        self.num_launched = self.num_mixed = 0

    def launch(self, plan: Plan) -> StepHandle:
        self._plan = plan
        self.num_launched += 1
        self.num_mixed += plan.is_mixed
        return self._runner.launch(plan)

    def describe(self) -> str:
        plan = self._plan
        if plan is None:
            return "nothing was launched"
        return (
            f"step {self.num_launched}: {len(plan.decode_request_ids)} rows at depth {plan.depth}, adjusted: "
            f"{self._runner.processors.is_used}, mixed: {plan.is_mixed}, prefills (start, tokens, scored): "
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


@pytest.mark.parametrize(
    ("device", "dtype", "num_streams", "num_requests", "output_lens"),
    [
        pytest.param("cpu", "float32", 8, 96, (1, 5, 12, 24), id="cpu"),
        pytest.param("cpu", "float32", 12, 400, OUTPUT_LENS, id="cpu-long", marks=pytest.mark.long),
        pytest.param(
            "cuda",
            "bfloat16",
            150,
            6000,
            OUTPUT_LENS,
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.timeout(580)],
        ),
    ],
)
def test_requests_of_every_kind_end_beside_one_another(
    device: str, dtype: DtypeName, num_streams: int, num_requests: int, output_lens: tuple[int, ...]
) -> None:
    config = EngineConfig(
        model_path=str(DEMO),
        device=device,  # type: ignore[arg-type]
        dtype=dtype,
        depth=3,
        mixed_above_tokens=16,
        prefill_chunk=256,
    )
    engine = LocalEngine(config)
    runner, scheduler = engine.engine.runner, engine.engine.scheduler
    runner.capture(range(4), progress=lambda _: None)
    noting = Noting(runner)
    engine.loop = EngineLoop(scheduler, noting, engine.post)
    with named_if_stuck(noting):
        num_aborted = run_crowd(
            engine, heldout_prompts(), num_streams=num_streams, num_requests=num_requests, output_lens=output_lens
        )  # fmt: skip
    reasons = {output.finish_reason for output in engine.outputs.values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT}
    assert num_aborted > 0.05 * num_requests
    assert noting.num_mixed > 0.05 * noting.num_launched
    stats = scheduler.snapshot()
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert stats.num_cached_prompt_tokens > 0
    assert 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
