"""A model with gated delta nets on a GPU: what its CPU tests promise in float32, in bfloat16, too, and with
graphs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from headway_testing.exactness import Case, generate_with
from headway_testing.hybrid import EXPERTS, REAL, HybridOracle, constructed_hybrid
from headway_testing.local import LateRunner, LocalEngine
from headway_testing.poison import PoisoningRunner

from headway.engine.bench.shape import SHAPES
from headway.engine.loop import EngineLoop
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Tiny sizes fill no tile.
MODELS = {
    "tiny-float32": ({}, "float32"),
    "tiny-bfloat16": ({}, "bfloat16"),
    "real-bfloat16": (REAL, "bfloat16"),
    "experts-bfloat16": (EXPERTS, "bfloat16"),
}
VOCAB_SIZE, KV_BYTES = 151, 1 << 25
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 80, 100, 127, 128, 129, 144, 150, 190, 200)
CHANGES = {
    "depth 0": {"depth": 0},
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "depth 3": {},
    "depth 4": {"depth": 4},
    "n-grams": {"drafter": "ngram"},
    "chunks of 64": {"prefill_chunk": 64},
    "chunks of 100, mixed": {"prefill_chunk": 100, "mixed_above_tokens": 0},
    "pairs": {"max_running": 2},
}


@pytest.fixture(scope="module", params=MODELS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The configuration that all engines of a test have in common."""
    sizes, dtype = MODELS[request.param]
    folder = HybridOracle(**sizes).save(tmp_path_factory.mktemp("model") / "model")
    fixed = {"model_path": str(folder), "dtype": dtype, "depth": 3, "max_running": 16}
    return fixed | {"kv_cache_memory_bytes": KV_BYTES}


def engine_of(base: dict[str, object], **changes: object) -> LocalEngine:
    return LocalEngine(EngineConfig(**(base | changes)))  # type: ignore[arg-type]


def text_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    numbers = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(numbers.tolist())


def cases_of(prompts: list[tuple[int, ...]], max_tokens: int) -> list[Case]:
    """Every second one is drawn."""
    return [
        Case(prompt, max_tokens, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return cases_of([text_of(length, seed=length) for length in LENGTHS], 40)


@pytest.fixture(scope="module")
def plain(base: dict[str, object], cases: list[Case]) -> list[list[int]]:
    """Each alone, without drafts."""
    engine = engine_of(base, depth=0, prefix_caching=False)
    return [generate_with(engine, [case])[0] for case in cases]


def differing(found: list[list[int]], wanted: list[list[int]]) -> list[tuple[int, int]]:
    """Returns (text, first place) of the texts that are not the same."""
    return [
        (i, next((n for n, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), -1))
        for i, (x, y) in enumerate(zip(found, wanted, strict=True))
        if x != y
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_changes_a_text(
    change: str, base: dict[str, object], cases: list[Case], plain: list[list[int]]
) -> None:
    """Together, then alone, in an engine that keeps prefixes; each twice, so that what was launched is then
    replayed."""
    engine = engine_of(base, **CHANGES[change])
    for _ in range(2):
        assert differing(generate_with(engine, cases), plain) == []
    assert differing([generate_with(engine, [case])[0] for case in cases], plain) == []
    stats = engine.engine.scheduler.snapshot()
    # Pairs take so long that their prefixes are gone when they come again.
    assert change == "pairs" or stats.num_cached_prompt_tokens > 0
    assert stats.num_graph_replays > 0


def test_a_warm_prefix_changes_nothing_around_blocks_and_checkpoints(base: dict[str, object]) -> None:
    text, other = text_of(200), text_of(200, seed=1)
    places = [around + shift for around in (64, 128) for shift in (-16, -1, 0, 1, 2, 15, 16, 17, 33)]
    prompts = [*(text[:n] for n in places), *((*text[:n], *other[: 170 - n]) for n in places)]
    cases = cases_of(prompts, 12)
    cold_engine = engine_of(base, prefix_caching=False)
    cold = [generate_with(cold_engine, [case])[0] for case in cases]
    engine = engine_of(base)
    generate_with(engine, cases_of([text[:199]], 2))
    assert differing([generate_with(engine, [case])[0] for case in cases], cold) == []
    assert differing(generate_with(engine, cases), cold) == []
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 64 * len(cases)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(depth: int, base: dict[str, object]) -> None:
    cases = cases_of([text_of(length, seed=length) for length in (30, 64, 70, 100)], 90)
    calm_engine = engine_of(base, depth=0, prefix_caching=False)
    calm = [generate_with(calm_engine, [case])[0] for case in cases]
    small = engine_of(base, depth=depth).engine.runner.pool.block_bytes() * 20
    engine = engine_of(base, depth=depth, kv_cache_memory_bytes=small)
    assert differing(generate_with(engine, cases), calm) == []
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


def test_every_number_of_rows_in_every_wave_as_on_the_cpu(tmp_path: Path) -> None:
    """1 to 20 at once, then waves that shrink, aborts, late reads; rows and blocks of nobody hold NaN."""
    path = str(constructed_hybrid(tmp_path / "model", noise=0.06, max_position_embeddings=300))
    chance = random.Random(0)
    texts = [tuple(chance.randrange(128) for _ in range(14 + 17 * (i % 12))) for i in range(40)]
    texts += [(*texts[i][:64], *texts[i + 1][-9:]) for i in range(0, 40, 2)]
    cases = [Case(text, 1 + i % 11) for i, text in enumerate(texts)]
    fixed = {"model_path": path, "dtype": "float32"}
    wanted = generate_with(engine_of(fixed, depth=0, device="cpu", max_running=20), cases)
    engine = engine_of(fixed, depth=3, max_running=20, kv_cache_memory_bytes=1 << 24)
    poisoned = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    engine.loop = EngineLoop(engine.engine.scheduler, LateRunner(poisoned), engine.post)
    for num_rows in (*range(1, 21), len(cases)):
        assert differing(generate_with(engine, cases[:num_rows]), wanted[:num_rows]) == [], num_rows
    ids: dict[int, int] = {}
    for _ in range(40):
        ids |= {
            engine.submit(c.prompt, max_tokens=c.max_tokens, max_draft_tokens=chance.choice((0, 1, None))): i
            for i, c in enumerate(cases[: chance.choice((3, 40))])
        }
        for _ in range(chance.randint(1, 9)):
            engine.step()
        for request_id in ids:
            if engine.outputs[request_id].finish_reason is None and chance.random() < 0.2:
                engine.loop._scheduler.abort(request_id)
                engine.outputs[request_id].finish_reason = FinishReason.ABORT
    engine.run()
    for request_id, case in ids.items():
        found = engine.outputs[request_id].token_ids
        is_whole = engine.outputs[request_id].finish_reason is not FinishReason.ABORT
        assert found == (wanted[case] if is_whole else wanted[case][: len(found)]), request_id
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_kv_blocks_used == 0
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_accepted_tokens > 0


def test_nothing_is_compiled_once_the_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    shape = json.loads((SHAPES / "qwen3.5-0.8b" / "config.json").read_text())
    shape["text_config"]["num_hidden_layers"] = 4
    (tmp_path / "config.json").write_text(json.dumps(shape))
    fixed = {"model_path": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096}
    engine = engine_of(fixed, depth=3, max_running=32, prefill_chunk=2048, kv_cache_memory_bytes=1 << 30)
    engine.engine.runner.capture([3], progress=lambda _: None)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr) and None
    )
    chance = random.Random(0)
    for num_prompts in (1, 2, 3, 8, 31):
        for length in (1, 64, 100, 129, 700, 2100):
            for i in range(num_prompts):
                prompt = [chance.randrange(1000) for _ in range(length - i % 2 * (length > 1))]
                engine.submit(
                    prompt, max_tokens=9, sampling=SamplingParams(temperature=0.8 * (i % 2), seed=i)
                )
            engine.run()
    assert compiled == []
