"""Logits that are no numbers: the requests that get them end with an error, others are what they would be
alone.

One token of the model's vocabulary has an infinite embedding. The text walks a cycle: whoever comes by the
token meets it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, walk
from headway_testing.local import GREEDY, LocalEngine
from safetensors.torch import load_file, save_file

from headway.engine import INTERNAL_ERROR
from headway.engine.build import Engine
from headway.engine.probe import check_drafts, check_logits
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams

BROKEN = 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def following(token_id: int, count: int) -> list[int]:
    return walk(token_id, count + 1)[1:]


def distance(token_id: int) -> int:
    """Steps until the broken token is the last of the text."""
    return following(token_id, 200).index(BROKEN) + 1


def begin_at(steps: int) -> int:
    """The token from which the broken one is so many steps away."""
    return next(token_id for token_id in range(128) if token_id != BROKEN and distance(token_id) == steps)


def engine_of(folder: Path, device: str, depth: int, broken: int = BROKEN) -> LocalEngine:
    config = EngineConfig(
        model_path=str(constructed_mimo(folder)), device=device, dtype="float32", depth=depth, max_running=8,
        kv_cache_memory_bytes=2**21,
    )  # fmt: skip
    engine = LocalEngine(config)
    if device == "cuda":
        gc.collect()  # graphs of earlier tests must not be freed while others are captured
        engine.engine.runner.capture(range(depth + 1), progress=lambda _: None)
    with torch.no_grad():
        engine.engine.runner.model.embedding[broken] = torch.inf
    return engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 11], ids=lambda steps: f"after-{steps}")
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.01}, {"num_logprobs": 3}, {"presence_penalty": 0.01}], ids=str
)
def test_only_the_request_with_broken_logits_ends(
    tmp_path: Path, device: str, depth: int, steps: int, options: dict[str, float]
) -> None:
    engine = engine_of(tmp_path, device, depth)
    sampling = SamplingParams(**({"temperature": 0.0} | options))  # type: ignore[arg-type]
    first = BROKEN if steps == 0 else begin_at(steps)
    far = begin_at(100)
    ids = [engine.submit([token_id], max_tokens=20, sampling=sampling) for token_id in (far, first, far)]
    outputs = engine.run()
    broken = outputs[ids[1]]
    assert (broken.finish_reason, broken.events[-1].error_code) == (FinishReason.ERROR, INTERNAL_ERROR)
    assert "NaN or infinite logits" in str(broken.events[-1].error)
    assert broken.token_ids == following(first, steps)[: len(broken.token_ids)]
    assert [outputs[i].token_ids for i in (ids[0], ids[2])] == [following(far, 20)] * 2
    stats = engine.engine.scheduler.snapshot()
    assert (stats.num_nan_logits, stats.finished_by_reason["error"]) == (1, 1)
    # Its blocks hold what is no number; who takes them next does not see it.
    for _ in range(3):
        again = [engine.submit([far], max_tokens=20, sampling=GREEDY) for _ in range(8)]
        outputs = engine.run()
        assert [outputs[i].token_ids for i in again] == [following(far, 20)] * 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_that_cannot_be_scored_ends_with_an_error(tmp_path: Path, device: str) -> None:
    engine = engine_of(tmp_path, device, 3)
    sampling = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=2)
    request_id = engine.submit([3, 4, BROKEN, 5, 6], max_tokens=4, sampling=sampling)
    output = engine.run()[request_id]
    assert output.finish_reason is FinishReason.ERROR
    assert "NaN or infinite logits" in str(output.events[-1].error)


def test_a_request_that_ends_before_broken_logits_is_whole(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "cpu", 3)
    assert engine.generate([begin_at(6)], max_tokens=6) == following(begin_at(6), 6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_is_broken_as_a_whole_is_found_at_its_start(tmp_path: Path, device: str) -> None:
    engine = engine_of(tmp_path, device, 3)
    check_logits(engine.engine)  # one broken embedding is not the whole
    assert engine.generate([begin_at(9)], max_tokens=8) == following(begin_at(9), 8)
    with torch.no_grad():
        engine.engine.runner.model.final_norm.weight[3] = torch.nan
    with pytest.raises(
        ModelError, match="NaN or infinite logits for every prompt that was tried, in float32"
    ):
        check_logits(engine.engine)


@pytest.mark.parametrize(
    ("check", "broken"),
    [(check_logits, 16), (partial(check_drafts, limit_seconds=inf), BROKEN)],
    ids=["check_logits", "check_drafts"],
)
def test_checks_of_the_start_leave_no_infinite_numbers_to_requests(
    tmp_path: Path, check: Callable[[Engine], object], broken: int
) -> None:
    """One has the broken token as its first prompt, texts of the other come by it."""
    engine = engine_of(tmp_path, "cpu", 3, broken=broken)
    check(engine.engine)
    pool = engine.engine.runner.pool
    assert all(tensor.isfinite().all() for _, state in pool.kinds() for tensor in state.values())


def test_weights_beyond_float16_are_found_at_the_start(tmp_path: Path) -> None:
    folder = constructed_mimo(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors")
    config = EngineConfig(
        model_path=str(folder), device="cpu", dtype="float16", max_running=2, kv_cache_memory_bytes=2**21
    )
    with pytest.raises(
        ModelError, match=r"in float16: values beyond 65,504 .* use --dtype bfloat16 or float32"
    ):
        check_logits(LocalEngine(config).engine)
    check_logits(LocalEngine(msgspec.structs.replace(config, dtype="float32")).engine)
