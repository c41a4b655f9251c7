"""The n-gram drafter in a running engine: what it proposes at every position, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, random_mimo, walk
from headway_testing.families import CLASSES, save, tiny_model
from headway_testing.local import LocalEngine
from headway_testing.ngrams import expected_drafts

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.ngram import MAX_NGRAM, NgramDrafter
from headway.engine.state.row_tensors import RowTensors

Proposal = tuple[int, int, list[int]]  # a row's seed, L, its drafts


def config_of(path: Path, **changes: object) -> EngineConfig:
    fixed = {"model_path": str(path), "device": "cpu", "dtype": "float64", "depth": 3, "drafter": "ngram"}
    return EngineConfig(**(fixed | {"kv_cache_memory_bytes": 1 << 24} | changes))  # type: ignore[arg-type]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """All that is proposed for live rows."""
    seen: list[Proposal] = []
    propose = NgramDrafter.propose

    def told(drafter: NgramDrafter, rows: RowTensors, depth: int) -> torch.Tensor:
        drafts = propose(drafter, rows, depth)
        is_live = rows.kv_lengths < rows.limits
        found = zip(rows.seeds.tolist(), rows.kv_lengths.tolist(), drafts.tolist(), strict=True)
        seen.extend(row for row, lives in zip(found, is_live.tolist(), strict=True) if lives)
        return drafts

    monkeypatch.setattr(NgramDrafter, "propose", told)
    return seen


@pytest.fixture
def texts_of(proposals: list[Proposal]) -> Iterator[Callable[..., dict[int, list[int]]]]:
    """Generates from prompts with seeds 0, 1, ...; afterwards every proposal must be what the whole text so
    far gives."""

    def run(
        engine: LocalEngine, prompts: list[list[int]], max_tokens: int, caps: tuple[int | None, ...] = (None,)
    ) -> dict[int, list[int]]:
        ids = [
            engine.submit(
                prompt,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=0.3 * (seed % 2), seed=seed),
                max_draft_tokens=caps[seed % len(caps)],
            )
            for seed, prompt in enumerate(prompts)
        ]
        engine.run()
        texts = {
            seed: [*prompts[seed], *engine.outputs[request].token_ids] for seed, request in enumerate(ids)
        }
        for seed, length, drafts in proposals:
            assert drafts == expected_drafts(texts[seed][: length + 1], len(drafts), MAX_NGRAM)
        assert {seed for seed, _, _ in proposals} == set(texts)
        proposals.clear()
        return texts

    yield run
    assert not proposals


def prompts_of(num_prompts: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(num_prompts)
    tokens = torch.randint(0, 12, (num_prompts, longest), generator=generator).tolist()
    return [tokens[i][: 1 + (7 * i) % longest] for i in range(num_prompts)]


# Of the dense families one is enough for the plain run: their engines differ in nothing that the drafter
# sees.
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(
            name, marks=() if name in ("MiMoForCausalLM", "Qwen3_5ForCausalLM") else pytest.mark.long
        )
        for name in CLASSES
    ],
)
def test_every_family_drafts_without_a_head(
    architecture: str, tmp_path: Path, texts_of: Callable[..., dict[int, list[int]]]
) -> None:
    if architecture == "MiMoForCausalLM":
        random_mimo(tmp_path)
    else:
        save(tiny_model(architecture), architecture, tmp_path)
    engine = LocalEngine(config_of(tmp_path))
    assert (engine.engine.info.drafter, engine.engine.info.has_draft_head) == ("ngram", False)
    prompts = prompts_of(6, 60)
    texts = texts_of(engine, prompts, 24)
    plain = LocalEngine(config_of(tmp_path, drafter="none"))
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.3 * (seed % 2), seed=seed)
        assert [*prompt, *plain.generate(prompt, max_tokens=24, sampling=sampling)] == texts[seed]
    assert plain.engine.info.depth == 0


@pytest.mark.parametrize("depth", [*(pytest.param(depth, marks=pytest.mark.long) for depth in (1, 2, 4)), 8])
def test_chunks_hits_and_shallow_rounds(
    depth: int, tmp_path: Path, texts_of: Callable[..., dict[int, list[int]]]
) -> None:
    """More requests than rows, prompts in chunks, rows that draft less or nothing, results that are read
    late."""
    random_mimo(tmp_path)
    changes = {"depth": depth, "prefill_chunk": 16, "max_running": 4}
    engine = LocalEngine(config_of(tmp_path, **changes), reads_late=True)
    prompts = prompts_of(12, 70)
    texts = texts_of(engine, prompts, 30, caps=(None, 1, 2, None, None))
    hits = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
    again = [[*texts[seed], *prompts[seed][:5]] for seed in range(len(prompts))]
    texts_of(engine, again, 30)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > hits + 12 * 16


def test_rounds_without_drafts_leave_no_hole(tmp_path: Path, proposals: list[Proposal]) -> None:
    """A row at depth 0 is joined by one that drafts and left by it, again and again."""
    random_mimo(tmp_path)
    engine = LocalEngine(config_of(tmp_path))
    prompts = prompts_of(6, 40)
    silent = engine.submit(
        prompts[5], max_tokens=150, sampling=SamplingParams(temperature=0.0, seed=9), max_draft_tokens=0
    )
    for seed, prompt in enumerate(prompts):
        for _ in range(20):
            engine.step()
        engine.submit(prompt, max_tokens=12, sampling=SamplingParams(temperature=0.0, seed=seed))
    engine.run()
    assert set(engine.engine.scheduler.snapshot().rounds_by_depth) == {0, 3}
    text = [*prompts[5], *engine.outputs[silent].token_ids]
    mine = [(length, drafts) for seed, length, drafts in proposals if seed == 9]
    assert len(mine) > 10
    for length, drafts in mine:
        assert drafts == expected_drafts(text[: length + 1], 3, MAX_NGRAM)


def test_a_row_that_does_not_draft_leaves_whole_blocks_to_the_prefix_cache(
    tmp_path: Path, texts_of: Callable[..., dict[int, list[int]]]
) -> None:
    random_mimo(tmp_path)
    engine = LocalEngine(config_of(tmp_path))
    prompts = prompts_of(6, 60)
    answers = [engine.generate(prompt, max_tokens=50, max_draft_tokens=0) for prompt in prompts]
    again = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    texts_of(engine, again, 20)
    hits = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
    assert hits == sum((len(text) - 1) // 16 * 16 for text in again)


def test_a_preempted_row_drafts_as_before(
    tmp_path: Path, texts_of: Callable[..., dict[int, list[int]]]
) -> None:
    random_mimo(tmp_path)
    blocks = 24
    engine = LocalEngine(
        config_of(tmp_path, max_model_len=128, kv_cache_memory_bytes=blocks * 16 * (3 * 2 * 2 * 16 * 8 + 4))
    )
    texts_of(engine, prompts_of(8, 40), 80)
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


def acceptance_length(engine: LocalEngine) -> float:
    """Tokens a row got in a round, on average."""
    rounds = engine.engine.scheduler.snapshot().row_rounds_by_emitted_tokens
    return sum(tokens * count for tokens, count in rounds.items()) / sum(rounds.values())


def test_a_text_that_repeats_its_prompt_is_drafted_whole(tmp_path: Path) -> None:
    """The model walks a cycle of 128 tokens, all of which the prompt has."""
    prompt = walk(0, 131)
    engine = LocalEngine(config_of(constructed_mimo(tmp_path), dtype="float32"))
    output = engine.generate(prompt, max_tokens=100)
    assert output == [prompt[(131 + i) % 128] for i in range(100)]
    assert acceptance_length(engine) > 3.9


@pytest.mark.gpu
def test_graphs_of_rounds_and_prompts_draft_too(tmp_path: Path) -> None:
    """Twelve requests over eight rows, whose prompts share the forward passes of rounds."""
    constructed_mimo(tmp_path)
    changes = {"device": "cuda", "dtype": "float32", "max_running": 8, "mixed_above_tokens": 4}
    engine = LocalEngine(config_of(tmp_path, **changes))
    engine.engine.runner.capture([3], progress=lambda _: None)
    requests = []
    for first in range(0, 120, 10):
        prompt = walk(first, 131)
        requests.append((engine.submit(prompt, max_tokens=60), prompt))
        engine.step()
    engine.run()
    for request, prompt in requests:
        assert engine.outputs[request].token_ids == [prompt[(131 + i) % 128] for i in range(60)]
    assert acceptance_length(engine) > 3.5
