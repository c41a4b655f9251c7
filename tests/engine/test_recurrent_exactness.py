"""Speculation, batches, prefix hits and preemption never change the text of a model with gated delta nets, in
float32.

A tiny Qwen3.5 with random weights. What its layers compute is the same to the last bit, so that no tie is
excused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from headway_testing.drafters import Guessing, Knowing
from headway_testing.exactness import Case, generate, generate_with
from headway_testing.hybrid import HybridOracle, change_tensors, constructed_hybrid
from headway_testing.local import LocalEngine
from safetensors.torch import load_file

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.drafter import Drafter

VOCAB_SIZE = 151
KV_BYTES = 1 << 23
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 80, 100, 127, 128, 129, 144, 150, 190, 200)
NUM_TOKENS = 10
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(HybridOracle().save(tmp_path_factory.mktemp("model") / "model"))


def config_of(path: str, **changes: object) -> EngineConfig:
    fixed = {
        "model_path": path,
        "dtype": "float32",
        "depth": 3,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_running": 16,
    }
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]


def text_of(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def cases_of(prompts: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> list[Case]:
    """Every second one is drawn."""
    return [
        Case(tuple(prompt), max_tokens, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return cases_of([text_of(length, seed=length) for length in LENGTHS])


@pytest.fixture(scope="module")
def plain(path: str, cases: list[Case]) -> list[list[int]]:
    """Each alone, without drafts."""
    engine = LocalEngine(config_of(path, depth=0, prefix_caching=False))
    return [generate_with(engine, [case])[0] for case in cases]


@pytest.mark.parametrize(
    ("depth", "drafter"),
    [
        (1, "mtp"), (4, "mtp"), (3, "ngram"),
        *(pytest.param(depth, drafter, marks=LONG) for depth, drafter in ((2, "mtp"), (3, "mtp"), (1, "ngram"), (4, "ngram"))),
    ],
)  # fmt: skip
def test_no_depth_changes_a_text_in_a_batch_of_sixteen(
    depth: int, drafter: str, path: str, cases: list[Case], plain: list[list[int]]
) -> None:
    assert generate(cases, config_of(path, depth=depth, drafter=drafter)) == plain


def test_no_chunk_size_changes_a_text(path: str, cases: list[Case], plain: list[list[int]]) -> None:
    for chunk in (64, 100):
        assert generate(cases, config_of(path, prefill_chunk=chunk, mixed_above_tokens=0)) == plain


@LONG
def test_a_request_alone_writes_at_depth_3_what_it_writes_without_drafts(
    path: str, cases: list[Case], plain: list[list[int]]
) -> None:
    engine = LocalEngine(config_of(path, prefix_caching=False))
    assert [generate_with(engine, [case])[0] for case in cases] == plain


@pytest.mark.parametrize(
    ("name", "acceptance"), [("random", (0.0, 0.05)), ("wrong", (0.0, 0.0)), ("right", (1.0, 1.0))]
)
def test_no_drafter_changes_a_text(
    name: str, acceptance: tuple[float, float], path: str, cases: list[Case], plain: list[list[int]]
) -> None:
    texts = {c.sampling.seed: [*c.prompt, *tokens] for c, tokens in zip(cases, plain, strict=True)}
    drafters: dict[str, Drafter] = {
        "random": Guessing(VOCAB_SIZE),
        "wrong": Knowing(texts, VOCAB_SIZE, shift=1),
        "right": Knowing(texts, VOCAB_SIZE, shift=0),
    }
    engine = LocalEngine(config_of(path), drafter=drafters[name])
    assert generate_with(engine, cases) == plain
    stats = engine.engine.scheduler.snapshot()
    low, high = acceptance
    assert low <= stats.num_accepted_tokens / stats.num_draft_tokens <= high


@pytest.mark.parametrize("around", [64, pytest.param(128, marks=LONG)])
def test_a_warm_prefix_changes_nothing_around_blocks_and_checkpoints(around: int, path: str) -> None:
    """Prompts that end, and that begin to differ, at every length around a checkpoint and the next blocks."""
    text, other = text_of(200), text_of(200, seed=1)
    places = [around + shift for shift in (-16, -1, 0, 1, 2, 15, 16, 17, 33)]
    ended = [text[:place] for place in places]
    parted = [[*text[:place], *other[: 170 - place]] for place in places]
    cases = cases_of([*ended, *parted], 6)
    cold = generate(cases, config_of(path, prefix_caching=False))
    engine = LocalEngine(config_of(path))
    generate_with(engine, cases_of([text[:199]], 2))
    assert [generate_with(engine, [case])[0] for case in cases] == cold
    assert generate_with(engine, cases) == cold
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_cached_prompt_tokens > 64 * len(cases)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=LONG), 3])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(depth: int, path: str) -> None:
    cases = cases_of([text_of(length, seed=length) for length in (30, 64, 70, 100)], 40)
    calm = generate(cases, config_of(path, depth=depth, prefix_caching=False))
    small = LocalEngine(config_of(path, depth=depth)).engine.runner.pool.block_bytes() * 18
    engine = LocalEngine(config_of(path, depth=depth, kv_cache_memory_bytes=small))
    assert generate_with(engine, cases) == calm
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


@pytest.mark.slow
def test_twenty_prompts_with_long_common_beginnings_find_the_same_text_in_a_small_cache(path: str) -> None:
    """In any order, again and again, while blocks and checkpoints of the others are evicted."""
    chance = random.Random(0)
    beginnings = [text_of(length, seed=length) for length in (128, 150, 80)]
    prompts = [
        [
            *beginnings[i % 3][: chance.choice([64, 80, 128, 150])],
            *text_of(chance.randint(1, 40), seed=100 + i),
        ]
        for i in range(20)
    ]
    cases = cases_of(prompts, 6)
    cold = generate(cases, config_of(path, prefix_caching=False))
    block_bytes = LocalEngine(config_of(path)).engine.runner.pool.block_bytes()
    engine = LocalEngine(
        config_of(path, max_running=2, kv_cache_memory_bytes=30 * block_bytes), reads_late=True
    )
    assert engine.engine.runner.pool.num_checkpoints < 20
    order = list(range(20))
    for _ in range(2):
        chance.shuffle(order)
        found = generate_with(engine, [cases[i] for i in order])
        assert found == [cold[i] for i in order]
    stats = engine.engine.scheduler.snapshot()
    most = sum(
        (len(prompt) - 1) // 64 * 64 for prompt in prompts
    )  # the second time, were nothing ever evicted
    assert most / 2 < stats.num_cached_prompt_tokens < 2 * most


@pytest.mark.parametrize("depth", [1, *(pytest.param(depth, marks=LONG) for depth in (2, 3)), 4])
def test_every_draft_of_the_constructed_model_is_accepted(depth: int, tmp_path: Path) -> None:
    path = str(constructed_hybrid(tmp_path))
    cases = [Case(tuple(text_of(length)[:length]), 40) for length in (5, 70)]
    cases = [Case(tuple(token % 128 for token in case.prompt), 40) for case in cases]
    engine = LocalEngine(config_of(path, depth=depth))
    found = generate_with(engine, cases)
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert found == generate(cases, config_of(path, depth=0))


def acceptance_of(path: str, cases: list[Case]) -> tuple[float, list[list[int]]]:
    engine = LocalEngine(config_of(path, depth=1))
    found = generate_with(engine, cases)
    stats = engine.engine.scheduler.snapshot()
    return stats.num_accepted_tokens / stats.num_draft_tokens, found


def test_a_broken_head_shows_in_its_acceptance_and_not_in_the_text(tmp_path: Path) -> None:
    """About half of the drafts are right; then the head's tensors are shuffled, lack their scales, as those
    of an FP8 copy do that is read as if it were none, or its norms are taken for weights less one."""
    path = str(constructed_hybrid(tmp_path, noise=0.07))
    cases = [Case(tuple(token % 128 for token in text_of(length)), 30) for length in (5, 30, 70, 90)]
    plain = generate(cases, config_of(path, depth=0))
    right, found = acceptance_of(path, cases)
    assert found == plain
    assert 0.3 < right < 0.95
    tensors = load_file(tmp_path / "model.safetensors")
    projection = tensors["mtp.fc.weight"]
    order = torch.randperm(len(projection), generator=torch.Generator().manual_seed(0))
    unscaled = {
        name: tensor * (torch.finfo(torch.float8_e4m3fn).max / tensor.abs().max())
        for name, tensor in tensors.items()
        if name.startswith("mtp.layers.") and name.endswith("_proj.weight")
    }
    for changes in (
        {"mtp.fc.weight": projection[order]},
        {"mtp.fc.weight": projection.roll(projection.shape[1] // 2, 1)},
        {"mtp.norm.weight": torch.full_like(tensors["mtp.norm.weight"], -1.0)},
        unscaled,
    ):
        change_tensors(
            tmp_path, {"mtp.fc.weight": projection, "mtp.norm.weight": tensors["mtp.norm.weight"]} | changes
        )
        broken, found = acceptance_of(path, cases)
        assert found == plain
        assert broken < right / 3
