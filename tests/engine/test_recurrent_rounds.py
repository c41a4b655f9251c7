"""Thousands of random rounds of one engine of a tiny Qwen3.5 write the texts that each request has alone,
without drafts.

Requests come, are aborted and are preempted, alone and in batches of 16, at depths 0 to 4, with cached
prefixes and in little memory. Before each step all that belongs to nobody is filled with rubbish, and after
it all state of others is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import pytest
import torch
from headway_testing.drafters import Guessing, Knowing
from headway_testing.exactness import Case, generate_with
from headway_testing.hybrid import HybridOracle, constructed_hybrid
from headway_testing.local import Late, LocalEngine
from headway_testing.poison import PoisoningRunner

from headway.engine.loop import EngineLoop
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Status
from headway.engine.speculation.drafter import Drafter
from headway.engine.state.specs import RowSpec

Device = Literal["cpu", "cuda"]

VOCAB_SIZE = 128
ROUNDS, LONG_ROUNDS, GPU_ROUNDS = 80, 2000, 5000
MAX_DEPTH = 4
NUM_ROWS = 16
NUM_CASES = 14
NUM_BLOCKS = 60
NUM_TOKENS = 28
STEMS = (64, 80, 128, 140)
STATE = {"states", "counts", "convolution"}
DRAFTERS = ("mtp", "random", "wrong", "right")
# The least and the most of the drafts that are accepted.
ACCEPTANCE = {"mtp": (0.1, 0.9), "random": (0.0, 0.05), "wrong": (0.0, 0.0), "right": (1.0, 1.0)}


def make_cases(chance: random.Random) -> list[Case]:
    """Prompts of which most share a beginning with others; every second one is sampled."""
    stems = [[chance.randrange(VOCAB_SIZE) for _ in range(max(STEMS))] for _ in range(2)]
    cases = []
    for seed in range(NUM_CASES):
        shared = chance.choice(stems)[: chance.choice((0, *STEMS))]
        prompt = [*shared, *(chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 30)))]
        cases.append(Case(tuple(prompt), NUM_TOKENS, SamplingParams(temperature=0.7 * (seed % 2), seed=seed)))
    return cases


@dataclass
class Model:
    """A folder, and the texts of requests in it, each alone, cold and without drafts."""

    path: str
    device: Device
    cases: list[Case]
    texts: list[list[int]] = field(default_factory=list)

    def config(self, **changes: object) -> EngineConfig:
        fixed = {
            "model_path": self.path,
            "device": self.device,
            "dtype": "float32" if self.device == "cpu" else "bfloat16",
            "max_running": NUM_ROWS,
            "max_model_len": 224,
        }
        return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]

    def drafter(self, name: str) -> Drafter | None:
        """None: the MTP head."""
        known = {
            case.sampling.seed: [*case.prompt, *text]
            for case, text in zip(self.cases, self.texts, strict=True)
        }
        drafters: dict[str, Drafter] = {
            "random": Guessing(VOCAB_SIZE),
            "wrong": Knowing(known, VOCAB_SIZE, shift=1),
            "right": Knowing(known, VOCAB_SIZE, shift=0),
        }
        return drafters.get(name)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, Device], Model]:
    """By whether the MTP head drafts: a constructed model of which about half of the drafts are right, or one
    of random weights."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path_of(has_head: bool) -> str:
        if has_head:
            return str(constructed_hybrid(folder / "constructed", noise=0.07))
        return str(HybridOracle(vocab_size=VOCAB_SIZE).save(folder / "random"))

    @cache
    def model_of(has_head: bool, device: Device) -> Model:
        model = Model(path_of(has_head), device, make_cases(random.Random(3)))
        engine = LocalEngine(model.config(depth=0, prefix_caching=False))
        model.texts = [generate_with(engine, [case])[0] for case in model.cases]
        return model

    return model_of


class Watch:
    """Launches steps and compares the recurrent state of rows and checkpoints that they must not change."""

    def __init__(self, engine: LocalEngine, chance: random.Random) -> None:
        runner = engine.engine.runner
        self._pool, self._slots = runner.pool, runner.rows
        self._state = engine.engine.scheduler.state
        self._poison = PoisoningRunner(runner, engine.engine.scheduler)
        self._chance = chance
        self.num_rounds = self.num_wide = self.num_saves = self.num_restores = self.num_waiting = 0

    def launch(self, plan: Plan) -> Late:
        self._poison.poison()
        before = self._states()
        handle = self._poison.launch(plan)
        others = self._foreign_entries(plan)
        assert torch.equal(before[others], self._states()[others]), f"step {plan.step} changed foreign state"
        self.num_rounds += len(plan.decode_request_ids) > 0
        self.num_wide += sum(request_id is not None for request_id in plan.decode_request_ids) == NUM_ROWS
        self.num_saves += len(plan.saves)
        self.num_restores += sum(setup.checkpoint is not None for setup in plan.setups)
        return Late(handle, is_late=self._chance.random() < 0.5)

    def _states(self) -> torch.Tensor:
        """Returns the bits of all recurrent state but windows, which are of no use once none of their tokens
        is left to be taken in: [rows and checkpoints, bytes]."""
        memory = self._pool._memory.items()
        layers = [t for spec, t in memory if isinstance(spec, RowSpec) and spec.name in STATE]
        flat = [layer.movedim(1, 0).flatten(1) for layer in layers]
        kept = self._pool.num_rows + self._pool.num_checkpoints + 1  # the entry after these belongs to no row
        return torch.cat([part.contiguous().view(torch.uint8) for part in flat], 1)[:kept].clone()

    def _foreign_entries(self, plan: Plan) -> list[int]:
        """Returns the rows whose prompts wait for a later step, and all checkpoints that this one does not
        make. Rows of rounds are left out, because one that has come to its limit takes its last window in
        once more."""
        own = {setup.row for setup in plan.setups} | {chunk.row for chunk in plan.prefill}
        waiting = {r.row for r in self._state.running if r.status is Status.PREFILLING} - own
        state_ids = self._slots.state_ids.tolist()
        self.num_waiting += len(waiting)
        made = {save.checkpoint for save in plan.saves}
        kept = [i for i in range(self._pool.num_checkpoints + 1) if i not in made]
        return [
            *(state_ids[row] for row in waiting if row is not None),
            *(self._pool.num_rows + i for i in kept),
        ]


def watched(model: Model, drafter: str, chance: random.Random) -> tuple[LocalEngine, Watch]:
    """Returns an engine in which requests are preempted for want of blocks now and then."""
    # The others need no more state than the n-gram drafter, whose place they take.
    kind = "mtp" if drafter == "mtp" else "ngram"
    block_bytes = LocalEngine(model.config(drafter=kind)).engine.runner.pool.block_bytes()
    config = model.config(
        drafter=kind,
        depth=MAX_DEPTH,
        kv_cache_memory_bytes=NUM_BLOCKS * block_bytes,
        prefill_chunk=100,
        mixed_above_tokens=8,
    )
    engine = LocalEngine(config, drafter=model.drafter(drafter))
    watch = Watch(engine, chance)
    engine.loop = EngineLoop(engine.engine.scheduler, watch, engine.post)
    return engine, watch


def run_rounds(model: Model, drafter: str, num_rounds: int) -> None:
    chance = random.Random(drafter)
    engine, watch = watched(model, drafter, chance)
    scheduler = engine.engine.scheduler
    wanted: dict[int, list[int]] = {}
    active: list[int] = []
    most, num_forced, num_compared = 1, 0, 0
    while watch.num_rounds < num_rounds or active:
        if chance.random() < 0.05:
            most = chance.choice((1, NUM_ROWS, NUM_ROWS + 4))
            scheduler.set_depth(chance.randint(0, MAX_DEPTH))
        while len(active) < most and watch.num_rounds < num_rounds and chance.random() < 0.7:
            index, length = chance.randrange(len(model.cases)), chance.randint(1, NUM_TOKENS)
            case = model.cases[index]
            request_id = engine.submit(
                case.prompt,
                max_tokens=length,
                sampling=case.sampling,
                max_draft_tokens=chance.choice((None, None, None, 0, 2)),
            )
            wanted[request_id] = model.texts[index][:length]
            active.append(request_id)
        if active and chance.random() < 0.06:
            num_forced += scheduler.preempt(chance.choice(active), forgets_blocks=chance.random() < 0.5)
        if active and chance.random() < 0.02:
            aborted = active.pop(chance.randrange(len(active)))
            scheduler.abort(aborted)
            wanted.pop(aborted)
        engine.step()
        for request_id in [i for i in active if engine.outputs[i].finish_reason is not None]:
            active.remove(request_id)
            output = engine.outputs.pop(request_id)
            assert output.finish_reason is FinishReason.LENGTH
            assert output.token_ids == wanted.pop(request_id), (
                f"request {request_id}, round {watch.num_rounds}"
            )
            num_compared += 1
    stats = scheduler.snapshot()
    low, high = ACCEPTANCE[drafter]
    assert low <= stats.num_accepted_tokens / stats.num_draft_tokens <= high
    assert stats.rounds_by_depth.keys() == set(range(MAX_DEPTH + 1))
    assert num_forced > num_rounds / 100
    num_natural = stats.num_preemptions - num_forced  # for want of blocks
    assert num_natural >= num_rounds // 1000, num_natural
    seen = (watch.num_saves, watch.num_restores, watch.num_wide, watch.num_waiting, num_compared)
    assert min(seen) > num_rounds / 200, seen


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("drafter", "num_rounds", "device"),
    [
        ("mtp", ROUNDS, "cpu"),
        *(pytest.param(drafter, LONG_ROUNDS, "cpu", marks=pytest.mark.long) for drafter in DRAFTERS),
        *(pytest.param(drafter, GPU_ROUNDS, "cuda", marks=pytest.mark.gpu) for drafter in ("mtp", "right")),
    ],
)
def test_random_rounds_write_what_each_request_writes_alone(
    drafter: str, num_rounds: int, device: Device, model_of: Callable[[bool, Device], Model]
) -> None:
    run_rounds(model_of(drafter == "mtp", device), drafter, num_rounds)
