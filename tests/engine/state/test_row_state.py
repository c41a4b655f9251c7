"""State by row, as recurrent layers keep it: through chunks, rejected drafts, compaction, preemption and prefix hits.

The layer is made up: a decaying sum in the place of attention. Every request's text is compared with one pass over the whole of
it from a state of zeros, which knows nothing of rows, rounds or checkpoints.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine
from headway_testing.padded import PaddedLaunches
from headway_testing.running_sum import with_running_sums

from headway.engine import build
from headway.engine.execution.device_rows import DeviceRows
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ChunkTokens, ForwardInputs, RowTokens
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import LogitsError
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Request
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import QueryBatch, TokenSpans

VOCABULARY, BLOCK_SIZE, MAX_LENGTH = 128, 16, 160


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    return constructed_mimo(folder, noise=0.08, max_position_embeddings=MAX_LENGTH)


@pytest.fixture(autouse=True)
def _recurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    load = build._load

    def load_with_sums(*args: Any) -> CausalLM:
        return with_running_sums(load(*args), scale=1.0)

    monkeypatch.setattr(build, "_load", load_with_sums)


def engine_of(path: Path, **changes: object) -> LocalEngine:
    sizes = {"max_running": 4, "prefill_chunk": 40, "block_size": BLOCK_SIZE, "dtype": "float64", "depth": 3}
    return LocalEngine(EngineConfig(model_path=str(path), **(sizes | changes)))  # type: ignore[arg-type]


def recomputed(model: CausalLM, tokens: list[int]) -> list[int]:
    """Returns the greedy token after each prefix, by one pass over all tokens on memory of its own."""
    count = len(tokens)
    pool = StatePool(
        model.state(), num_blocks=-(-count // 16), num_rows=1, block_size=16, device=model.device
    )
    one = torch.zeros(1, dtype=torch.int64)
    places = torch.arange(count)
    batch = QueryBatch.of_windows(torch.arange(pool.num_blocks)[None], one, count)
    rows = RowTokens(one, chunks=ChunkTokens(TokenSpans(one, one, torch.tensor([count]), one > 0)))
    inputs = ForwardInputs(torch.tensor(tokens), places, places, (batch,), rows)
    return model.logits(model.forward(inputs, pool)).argmax(-1).tolist()


def check(engine: LocalEngine, prompts: dict[int, list[int]]) -> None:
    for request_id, prompt in prompts.items():
        found = engine.outputs[request_id].token_ids
        expected = recomputed(engine.engine.runner.model, [*prompt, *found])
        assert found == expected[len(prompt) - 1 : -1], f"request {request_id}, prompt of {len(prompt)}"


def run_schedule(path: Path, seed: int) -> tuple[LocalEngine, list[Plan]]:
    """Requests that share beginnings come, go and are aborted, in little memory and at changing depth."""
    chance = random.Random(seed)
    chunk = chance.choice([16, 24, 40])
    engine = engine_of(
        path,
        prefill_chunk=chunk,
        depth=chance.randint(1, 3),
        mixed_above_tokens=chance.choice([None, 0]),
        kv_cache_memory_bytes=chance.choice([None, 18 * engine_block_bytes(path)]),
    )
    runner, plans = engine.engine.runner, []
    if chance.random() < 0.5:
        PaddedLaunches(runner, StepGrid(row_counts(4), (16, chunk), (16,)))
    launch = runner.launch

    def noting(plan: Plan) -> object:
        plans.append(plan)
        return launch(plan)

    runner.launch = noting  # type: ignore[method-assign, assignment]
    beginnings = [[chance.randrange(VOCABULARY) for _ in range(60)] for _ in range(2)]
    prompts: dict[int, list[int]] = {}
    for _ in range(chance.randint(5, 9)):
        shared = chance.choice(beginnings)[: chance.choice([0, 20, 33, 48, 60])]
        prompt = shared + [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 25))]
        if prompts and chance.random() < 0.3:  # a chat's next turn
            last = chance.choice(list(prompts))
            prompt = (prompts[last] + engine.outputs[last].token_ids)[: MAX_LENGTH - 60] + prompt[-5:]
        request_id = engine.submit(prompt, max_tokens=chance.randint(1, 30), priority=chance.randint(0, 1))
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


def run_schedules(path: Path, seeds: range) -> None:
    """All that a schedule can show is seen in some of them."""
    saved = restored = moved = preempted = accepted = rejected = mixed = 0
    for seed in seeds:
        engine, plans = run_schedule(path, seed)
        stats = engine.engine.scheduler.snapshot()
        saved += sum(len(plan.saves) for plan in plans)
        restored += sum(setup.checkpoint is not None for plan in plans for setup in plan.setups)
        moved += sum(len(plan.moves) for plan in plans)
        mixed += sum(plan.is_mixed for plan in plans)
        preempted += stats.num_preemptions
        accepted += sum(stats.accepted_tokens_per_position)
        rejected += sum(stats.draft_tokens_per_position) - sum(stats.accepted_tokens_per_position)
    assert min(saved, restored, moved, preempted, accepted, rejected, mixed) > 0


def test_text_equals_that_of_one_pass_over_all_of_it(path: Path) -> None:
    run_schedules(path, range(12))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_text_equals_that_of_one_pass_over_all_of_it_in_many_schedules(path: Path) -> None:
    run_schedules(path, range(12, 200))


def plant_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CausalLM, "commit", lambda *_: None)


def plant_restore(patch: pytest.MonkeyPatch) -> None:
    start = StatePool.start_rows
    patch.setattr(StatePool, "start_rows", lambda pool, ids, c: start(pool, ids, torch.full_like(c, -1)))


def plant_dirty_start(patch: pytest.MonkeyPatch) -> None:
    """What the row's last request left stays."""
    start = StatePool.start_rows
    patch.setattr(StatePool, "start_rows", lambda pool, ids, c: start(pool, ids[c >= 0], c[c >= 0]))


def plant_late_save(patch: pytest.MonkeyPatch) -> None:
    """The checkpoints are made before the pass."""
    update, save = DeviceRows.update, DeviceRows.save

    def update_and_save(table: DeviceRows, plan: Plan) -> Any:
        faults = update(table, plan)
        save(table, plan.saves)
        return faults

    patch.setattr(DeviceRows, "update", update_and_save)
    patch.setattr(DeviceRows, "save", lambda *_: None)


def plant_kept_ids(patch: pytest.MonkeyPatch) -> None:
    """A move copies the row but leaves the state ids as they are."""
    move = RowTensors.move

    def moved(rows: RowTensors, sources: torch.Tensor, targets: torch.Tensor) -> None:
        ids = rows.state_ids.clone()
        move(rows, sources, targets)
        rows.state_ids.copy_(ids)

    patch.setattr(RowTensors, "move", moved)


@pytest.mark.parametrize(
    "plant", [plant_commit, plant_restore, plant_dirty_start, plant_late_save, plant_kept_ids]
)
def test_the_schedules_find_faults(plant: Any, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError, match="request"):
            run_schedules(path, range(12))


def test_a_hit_ends_at_a_checkpoint(path: Path) -> None:
    """A first prompt leaves one at its last border, a second one where it begins to differ, which a third one finds."""
    chance = random.Random(5)
    common = [chance.randrange(VOCABULARY) for _ in range(50)]
    prompts = [common + [chance.randrange(VOCABULARY) for _ in range(30)] for _ in range(3)]
    engine = engine_of(path, prefill_chunk=64)
    found = []
    for prompt in prompts:
        before = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
        engine.generate(prompt, max_tokens=4)
        found.append(engine.engine.scheduler.snapshot().num_cached_prompt_tokens - before)
    assert found == [0, 0, 48]
    engine.generate(prompts[0], max_tokens=4)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens == 48 + 64
    check(engine, {i: [*prompts, prompts[0]][i] for i in range(4)})


def test_a_broken_request_leaves_no_checkpoint_at_blocks_of_others(path: Path) -> None:
    """The second prompt makes one where the first prompt's blocks, which stay published, end; then its logits are NaN."""
    chance = random.Random(5)
    common = [chance.randrange(VOCABULARY) for _ in range(50)]
    prompts = [common + [chance.randrange(VOCABULARY) for _ in range(30)] for _ in range(3)]
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
