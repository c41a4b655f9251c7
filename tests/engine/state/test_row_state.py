"""State by row, as recurrent layers keep it: through chunks, rejected drafts, compaction, preemption and
prefix hits.

The layer is made up, a decaying sum in the place of attention, or a gated delta net. Every request's text is
compared with one pass over its prompt and one over what it generated, from a state of zeros, which know
nothing of rows, rounds or checkpoints.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.hybrid import constructed_hybrid
from headway_testing.local import LocalEngine
from headway_testing.padded import PaddedLaunches
from headway_testing.planted import forgets_checkpoints, saves_checkpoints_too_early
from headway_testing.poison import PoisoningRunner
from headway_testing.running_sum import with_running_sums

from headway.engine import build
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ChunkTokens, ForwardInputs, RowTokens
from headway.engine.layers.model_pair import ModelPair
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import LogitsError
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Request
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import QueryBatch, TokenSpans

VOCABULARY, BLOCK_SIZE = 128, 16


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer, and prompts that show what becomes of its state. chunks: prefill_chunk.
    shared: how much of its beginning a prompt shares. num_blocks: a KV cache in which requests are preempted.
    common, own: lengths of the parts of prompts of which the last two borders are those named so."""

    folder: Callable[[Path], Path]
    max_length: int
    chunks: tuple[int, ...]
    shared: tuple[int, ...]
    num_blocks: int
    num_schedules: int
    most_tokens: int
    common: int
    own: int
    common_border: int
    last_border: int
    is_made_up: bool = False


KINDS = {
    "running sum": Kind(
        lambda folder: constructed_mimo(folder, noise=0.08, max_position_embeddings=160),
        160, (16, 24, 40), (0, 20, 33, 48, 60), 18, 6, 30, 50, 30, 48, 64, is_made_up=True,
    ),
    "delta net": Kind(
        lambda folder: constructed_hybrid(folder, noise=0.1, max_position_embeddings=300),
        300, (64, 100), (0, 40, 64, 100, 128), 20, 6, 40, 100, 100, 64, 192,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def path(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kind.folder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(autouse=True)
def _recurrent(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_sums(make: Callable[..., ModelPair]) -> Callable[..., ModelPair]:
        def made(*args: Any) -> ModelPair:
            models = make(*args)
            with_running_sums(models.target, scale=1.0)
            return models

        return made

    if kind.is_made_up:
        monkeypatch.setattr(build, "_load", with_sums(build._load))
        monkeypatch.setattr(ModelPair, "outline", with_sums(ModelPair.outline))


def engine_of(path: Path, **changes: object) -> LocalEngine:
    sizes = {"max_running": 4, "prefill_chunk": 64, "block_size": BLOCK_SIZE, "dtype": "float64", "depth": 3}
    return LocalEngine(EngineConfig(model_path=str(path), **(sizes | changes)))  # type: ignore[arg-type]


def recomputed(model: CausalLM, prompt: list[int], generated: list[int]) -> list[int]:
    """Returns the greedy token after each prefix that begins with the prompt, by two passes on memory of
    their own."""
    count = len(prompt) + len(generated)
    pool = StatePool(
        model.state(), num_blocks=-(-count // 16), num_rows=1, block_size=16, device=model.device
    )
    one, found, start = torch.zeros(1, dtype=torch.int64), [], 0
    for tokens in filter(None, (prompt, generated)):
        length = torch.tensor([len(tokens)])
        places = torch.arange(start, start + len(tokens))
        table = torch.arange(pool.num_blocks)[None]
        batch = QueryBatch.of_windows(table, torch.tensor([start]), len(tokens))
        rows = RowTokens(one, chunks=ChunkTokens(TokenSpans(one, one, length, one + start > 0)))
        inputs = ForwardInputs(torch.tensor(tokens), places, places, (batch,), rows)
        found += model.logits(model.forward(inputs, pool).last).argmax(-1).tolist()
        start += len(tokens)
    return found[len(prompt) - 1 : -1]


def check(engine: LocalEngine, prompts: dict[int, list[int]]) -> None:
    for request_id, prompt in prompts.items():
        found, reason = engine.outputs[request_id].token_ids, engine.outputs[request_id].finish_reason
        assert reason is not FinishReason.ERROR, f"request {request_id} ended by an error"
        expected = recomputed(engine.engine.runner.model, prompt, found)
        assert found == expected, f"request {request_id}, prompt of {len(prompt)}"


def run_schedule(kind: Kind, path: Path, seed: int) -> tuple[LocalEngine, list[Plan]]:
    """Requests that share beginnings come, go and are aborted, in little memory and at changing depth."""
    chance = random.Random(seed)
    chunk = chance.choice(kind.chunks)
    engine = engine_of(
        path,
        prefill_chunk=chunk,
        depth=chance.randint(1, 3),
        mixed_above_tokens=chance.choice([None, 0]),
        kv_cache_memory_bytes=chance.choice([None, kind.num_blocks * engine_block_bytes(path)]),
    )
    runner, plans = engine.engine.runner, []
    if chance.random() < 0.5:
        PaddedLaunches(
            runner, StepGrid(row_counts(4), (16, chunk), (16,) if kind.is_made_up else (16, chunk))
        )
    poisoning = PoisoningRunner(runner, engine.engine.scheduler)

    def noting(plan: Plan) -> object:
        plans.append(plan)
        return poisoning.launch(plan)

    engine.loop._runner = SimpleNamespace(launch=noting)
    beginnings = [[chance.randrange(VOCABULARY) for _ in range(kind.shared[-1])] for _ in range(2)]
    prompts: dict[int, list[int]] = {}
    for _ in range(chance.randint(5, 9)):
        shared = chance.choice(beginnings)[: chance.choice(kind.shared)]
        prompt = shared + [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 25))]
        if prompts and chance.random() < 0.3:  # a chat's next turn
            last = chance.choice(list(prompts))
            prompt = (prompts[last] + engine.outputs[last].token_ids)[
                : kind.max_length - kind.most_tokens - 30
            ] + prompt[-5:]
        request_id = engine.submit(
            prompt, max_tokens=chance.randint(1, kind.most_tokens), priority=chance.randint(0, 1)
        )
        prompts[request_id] = prompt
        for _ in range(chance.randint(0, 12)):
            engine.step()
        if chance.random() < 0.2:
            engine.engine.scheduler.set_depth(chance.randint(0, engine.engine.scheduler.state.max_depth))
        if chance.random() < 0.1 and engine.outputs[request_id].finish_reason is None:
            engine.engine.scheduler.abort(request_id)
            engine.outputs[request_id].finish_reason = FinishReason.ABORT
    engine.run()
    check(engine, prompts)
    return engine, plans


@functools.cache
def engine_block_bytes(path: Path) -> int:
    """Of a model of two layers and an MTP layer, whose sizes the folder says: measured once."""
    return engine_of(path).engine.runner.pool.block_bytes()


def run_schedules(kind: Kind, path: Path, seeds: range) -> None:
    """All that a schedule can show is seen in some of them."""
    saved = restored = moved = preempted = accepted = rejected = mixed = 0
    for seed in seeds:
        engine, plans = run_schedule(kind, path, seed)
        stats = engine.engine.scheduler.snapshot()
        saved += sum(len(plan.saves) for plan in plans)
        restored += sum(setup.checkpoint is not None for plan in plans for setup in plan.setups)
        moved += sum(len(plan.moves) for plan in plans)
        mixed += sum(plan.is_mixed for plan in plans)
        preempted += stats.num_preemptions
        accepted += sum(stats.accepted_tokens_per_position)
        rejected += sum(stats.draft_tokens_per_position) - sum(stats.accepted_tokens_per_position)
    assert min(saved, restored, moved, preempted, accepted, rejected, mixed) > 0


def test_text_equals_that_of_one_pass_over_all_of_it(kind: Kind, path: Path) -> None:
    run_schedules(kind, path, range(kind.num_schedules))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_text_equals_that_of_one_pass_over_all_of_it_in_many_schedules(kind: Kind, path: Path) -> None:
    run_schedules(kind, path, range(kind.num_schedules, 200))


def plant_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CausalLM, "commit", lambda *_: None)


def plant_dirty_start(patch: pytest.MonkeyPatch) -> None:
    """What the row's last request left stays."""
    start = StatePool.start_rows
    patch.setattr(StatePool, "start_rows", lambda pool, ids, c: start(pool, ids[c >= 0], c[c >= 0]))


def plant_kept_ids(patch: pytest.MonkeyPatch) -> None:
    """A move copies the row but leaves the state ids as they are."""
    move = RowTensors.move

    def moved(rows: RowTensors, sources: torch.Tensor, targets: torch.Tensor) -> None:
        ids = rows.state_ids.clone()
        move(rows, sources, targets)
        rows.state_ids.copy_(ids)

    patch.setattr(RowTensors, "move", moved)


PLANTS = (plant_commit, forgets_checkpoints, plant_dirty_start, saves_checkpoints_too_early, plant_kept_ids)


# Faults in what is kept of rows are found by the layer that is made up, which is faster; commits differ.
@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        *(("running sum", plant) for plant in PLANTS),
        ("delta net", plant_commit),
        *(pytest.param("delta net", plant, marks=pytest.mark.long) for plant in PLANTS[1:]),
    ],
    indirect=["kind"],
)
def test_the_schedules_find_faults(plant: Any, kind: Kind, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError, match="request"):
            run_schedules(kind, path, range(kind.num_schedules))


def prompts_with_common_beginning(kind: Kind) -> list[list[int]]:
    chance = random.Random(5)
    common = [chance.randrange(VOCABULARY) for _ in range(kind.common)]
    return [common + [chance.randrange(VOCABULARY) for _ in range(kind.own)] for _ in range(3)]


def test_a_hit_ends_at_a_checkpoint(kind: Kind, path: Path) -> None:
    """A first prompt leaves one at its last border, a second one where it begins to differ, which a third one
    finds."""
    prompts = prompts_with_common_beginning(kind)
    engine = engine_of(path, prefill_chunk=64)
    found = []
    for prompt in prompts:
        before = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
        engine.generate(prompt, max_tokens=4)
        found.append(engine.engine.scheduler.snapshot().num_cached_prompt_tokens - before)
    assert found == [0, 0, kind.common_border]
    engine.generate(prompts[0], max_tokens=4)
    assert (
        engine.engine.scheduler.snapshot().num_cached_prompt_tokens == kind.common_border + kind.last_border
    )
    check(engine, {i: [*prompts, prompts[0]][i] for i in range(4)})


def test_a_broken_request_leaves_no_checkpoint_at_blocks_of_others(kind: Kind, path: Path) -> None:
    """The second prompt makes one where the first prompt's blocks, which stay published, end; then its logits
    are NaN."""
    prompts = prompts_with_common_beginning(kind)
    engine = engine_of(path, prefill_chunk=64)
    state = engine.engine.scheduler.state
    engine.generate(prompts[0], max_tokens=4)
    broken = engine.submit(prompts[1], max_tokens=40)
    while not engine.outputs[broken].token_ids:
        engine.step()

    def find_nan(_: Request) -> None:
        raise LogitsError("NaN")

    state.contain(find_nan, state.requests[broken])
    engine.run()
    assert engine.outputs[broken].finish_reason is FinishReason.ERROR
    engine.generate(prompts[2], max_tokens=4)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens == 0
