"""A request that goes on in another engine, cut anywhere, gets what it gets in one: tokens, log-probabilities
and the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.hybrid import constructed_hybrid
from headway_testing.local import LocalEngine, Output

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import SamplingParams, ThinkingBudget

NUM_TOKENS = 40
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5, num_logprobs=3),
    SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=0),
    SamplingParams(temperature=1.2, seed=7, min_tokens=20, bad_words_token_ids=[[3, 4]]),
    SamplingParams(temperature=1.0, seed=8, thinking_budget=ThinkingBudget(30, 11)),
]


def requests() -> list[Submit]:
    generator = torch.Generator().manual_seed(0)
    return [
        Submit(
            request_id=number,
            prompt_token_ids=torch.randint(0, 128, (20 * number + 3,), generator=generator).tolist(),
            sampling=sampling,
            max_tokens=NUM_TOKENS,
            stop_token_ids=[17] if sampling.min_tokens else [],
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]


def added(output: Output) -> list[tuple[int, float | None]]:
    scores = output.logprobs.logprobs or [None] * len(output.token_ids)
    return list(zip(output.token_ids, scores, strict=True))


@pytest.mark.parametrize(
    ("make", "drafter"),
    [
        pytest.param(constructed_mimo, "ngram", marks=pytest.mark.slow),
        pytest.param(constructed_mimo, "mtp", marks=pytest.mark.slow),
        (constructed_hybrid, "mtp"),
    ],
)
def test_a_request_goes_on_in_another_engine_as_if_nothing_had_happened(
    make: Callable[..., Path], drafter: str, tmp_path: Path
) -> None:
    path = str(make(tmp_path / "model", noise=0.1))

    def run(submits: list[Submit], num_steps: int | None = None) -> dict[int, Output]:
        config = EngineConfig(
            model_path=path, dtype="float32", depth=3, drafter=drafter, max_running=4,
            kv_cache_memory_bytes=16 << 20,
        )  # type: ignore[arg-type]  # fmt: skip
        engine = LocalEngine(config)
        for submit in submits:
            engine.outputs[submit.request_id] = Output()
            engine.post.inbox.append(submit)
        if num_steps is None:
            engine.run()
        for _ in range(num_steps or 0):
            engine.step()
        return engine.outputs

    wanted = run(requests())
    for num_steps in (1, 8):
        got = run(requests(), num_steps)
        open_requests = [r for r in requests() if got[r.request_id].finish_reason is None]
        assert open_requests
        resumed = run([
            msgspec.structs.replace(r, output_token_ids=got[r.request_id].token_ids) for r in open_requests
        ])  # fmt: skip
        for request_id, output in resumed.items():
            assert added(got[request_id]) + added(output) == added(wanted[request_id])
            assert output.finish_reason is wanted[request_id].finish_reason
