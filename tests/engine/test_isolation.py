"""A step touches the memory of its own rows only: thousands of random rounds, every other bit compared.

Real model, kernels, scheduler and runner; acceptance between 0 and 1, prefix hits, aborts, preemption;
rubbish in all rows and blocks that belong to nobody. On a GPU the rounds are replayed from graphs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.hybrid import EXPERTS, constructed_hybrid
from headway_testing.local import Late, LocalEngine
from headway_testing.poison import PoisoningRunner

from headway.engine.build import Engine
from headway.engine.execution.runner import Runner
from headway.engine.loading.headers import DtypeName
from headway.engine.loop import EngineLoop
from headway.engine.models.registry import read_model_spec
from headway.engine.outline import DeviceFacts, wanted_device
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DrafterName
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.resolve import announced, resolve
from headway.engine.scheduling.plan import Plan
from headway.engine.speculation.mtp import MtpDrafter
from headway.engine.speculation.ngram import NgramDrafter
from headway.engine.state.pool import StatePool
from headway.engine.state.specs import RowSpec

# Text of this model hardly ever repeats itself, so that n-grams need more rounds to be watched as often.
ROUNDS, LONG_ROUNDS, GPU_ROUNDS = {"mtp": 200, "ngram": 300}, 2000, 10_000
NOISE = 0.06  # of the constructed models, whose drafts are sometimes wrong
GUARD_BLOCKS = 3
GUARD = 12345.0
BLOCK = 16
# Says which rows the last round left alone; the round writes it for all rows it was given, as it writes
# what RowSpec calls scratch.
SCRATCH = {"prefill_status"}
# A round writes them for all its rows, padding too; a request that gets a row starts with them anew.
RECURRENT = {"states", "counts", "mixed", "gates", "convolution", "windows"}


class Watch:
    """Launches steps and compares all that they must not change, bit by bit."""

    def __init__(self, engine: Engine) -> None:
        runner, num_blocks = engine.runner, engine.info.num_blocks
        model, old = runner.model, runner.pool
        pool = StatePool(
            old._layers,
            old._specs[-1],
            draft_layers=old._specs[len(old._layers) : -1],
            num_blocks=num_blocks + GUARD_BLOCKS,
            num_rows=old.num_rows,
            num_checkpoints=old.num_checkpoints,
            block_size=BLOCK,
            device=model.device,
        )
        assert old.block_size == BLOCK
        for tensor in pool.by_block():
            tensor[num_blocks:] = GUARD
        drafter = runner.launcher.context.drafter
        if isinstance(drafter, MtpDrafter):
            drafter = MtpDrafter(drafter.model, pool, runner.rows, max_depth=engine.info.depth)
        else:
            drafter = NgramDrafter(pool)
        self.engine = engine
        self.runner = Runner(model, pool, runner.rows, drafter, max_depth=engine.info.depth)
        self.runner.capture(range(engine.info.depth + 1), progress=lambda _: None)
        self.poison = PoisoningRunner(self.runner, engine.scheduler)
        self.num_blocks = num_blocks
        self.chance = random.Random(1)
        self.rounds = self.mixed = 0
        self.bystanders = 0

    def launch(self, plan: Plan) -> Late:
        self.poison.poison()
        blocks = self.blocks()
        rows = {name: t.clone() for name, t in self.row_tensors().items()}
        live = self.live_rows(plan)
        handle = self.poison.launch(plan)
        self.rounds += len(plan.decode_request_ids) > 0
        self.mixed += plan.is_mixed
        mine = self.blocks_of(plan, live)
        others = [block for block in range(self.num_blocks + GUARD_BLOCKS) if block not in mine]
        assert torch.equal(blocks[others], self.blocks()[others]), (
            f"step {plan.step} wrote to a foreign block"
        )
        idle = [row for row in range(len(rows["limits"])) if row not in touched_rows(plan) | live.keys()]
        self.bystanders += sum(row < len(plan.decode_request_ids) for row in idle)
        outside = [row for row in idle if row >= self.num_rows_of(plan)]
        for name, now in self.row_tensors().items():
            kept = outside if name in RECURRENT else idle
            assert torch.equal(rows[name][kept], now[kept]), (
                f"step {plan.step} changed {name} of a foreign row"
            )
        return Late(handle, is_late=self.chance.random() < 0.5)

    def num_rows_of(self, plan: Plan) -> int:
        """Returns the number of rows of the step's round, with padding."""
        num_rows, grid = len(plan.decode_request_ids), self.runner.grid
        is_padded = grid is not None and num_rows > 0
        return next(n for n in grid.row_counts if n >= num_rows) if is_padded else num_rows

    def row_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is stored by row."""
        slots = {name: t for name, t in self.runner.rows.tensors().items() if name not in SCRATCH}
        tensors = slots | self.runner.processors.first(len(slots["limits"])).tensors()
        of_rows = {
            spec.name: tensor
            for spec, tensor in self.runner.pool._memory.items()
            if isinstance(spec, RowSpec) and not spec.is_scratch
        }
        tensors |= {name: tensor[:, slots["state_ids"]].transpose(0, 1) for name, tensor in of_rows.items()}
        return {name: bits(tensor) for name, tensor in tensors.items()}

    def live_rows(self, plan: Plan) -> dict[int, int]:
        """Rows that the round may move on, those that the device knows to be below their limits, with the
        position of the oldest pending pair.

        The host may not know yet that a row has come to its limit; the device must leave it alone.
        """
        slots = self.runner.rows
        sources = {move.target: move.source for move in plan.moves}
        lengths, limits = slots.kv_lengths.tolist(), slots.limits.tolist()
        pending = slots.pending_counts.tolist()
        live = {}
        for row, request_id in enumerate(plan.decode_request_ids):
            source = sources.get(row, row)
            if request_id is not None and lengths[source] < limits[source]:
                live[row] = max(0, lengths[source] - pending[source] + 1)
        return live

    def blocks(self) -> torch.Tensor:
        """[blocks, everything stored for a block]."""
        return torch.cat([bits(tensor).flatten(1) for tensor in self.runner.pool.by_block()], 1)

    def blocks_of(self, plan: Plan, live: dict[int, int]) -> set[int]:
        """Returns the blocks that the step may write: those of the chunks' tokens and, of each row of the
        round, those from its oldest pending pair on."""
        table = self.runner.rows.granted_block_ids
        mine: set[int] = set()
        for chunk in plan.prefill:
            end = chunk.start + len(chunk.token_ids)
            mine |= set(table[chunk.row, chunk.start // BLOCK : -(-end // BLOCK)].tolist())
        for row, oldest in live.items():
            mine |= set(table[row, oldest // BLOCK :].tolist())
        return mine - {-1}


def touched_rows(plan: Plan) -> set[int]:
    """Rows that the host's part of the step sets or moves."""
    rows = {*plan.released_rows, *(s.row for s in plan.setups), *(g.row for g in plan.grants)}
    rows |= {row for move in plan.moves for row in (move.source, move.target)}
    return rows | {chunk.row for chunk in plan.prefill}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself only as bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize]) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize(
    ("drafter", "num_rounds"),
    [
        ("mtp", ROUNDS["mtp"]),
        pytest.param("ngram", ROUNDS["ngram"], marks=pytest.mark.slow),
        *(pytest.param(name, LONG_ROUNDS, marks=pytest.mark.long) for name in ROUNDS),
    ],
)
def test_a_step_writes_to_its_own_rows_and_blocks_only(
    tmp_path: Path, drafter: DrafterName, num_rounds: int
) -> None:
    run_watched(mimo_of(tmp_path), device="cpu", num_rounds=num_rounds, drafter=drafter)


@pytest.mark.gpu
@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("dtype", "drafter"), [("float32", "mtp"), ("bfloat16", "mtp"), ("bfloat16", "ngram")]
)
def test_a_replayed_step_writes_to_its_own_rows_and_blocks_only(
    tmp_path: Path, dtype: DtypeName, drafter: DrafterName
) -> None:
    path, num_rounds = mimo_of(tmp_path), GPU_ROUNDS // 2
    watch = run_watched(path, device="cuda", dtype=dtype, num_rounds=num_rounds, drafter=drafter)
    stats = watch.engine.scheduler.snapshot()
    assert stats.num_graph_replays > 0.9 * watch.rounds


@pytest.mark.parametrize(
    ("device", "num_rounds", "sizes"),
    [
        pytest.param("cpu", 200, {"architecture": "Qwen3_5MoeForCausalLM"}, marks=pytest.mark.slow),
        pytest.param("cuda", GPU_ROUNDS, EXPERTS, marks=[pytest.mark.gpu, pytest.mark.timeout(580)]),
    ],
)
def test_a_step_of_delta_nets_and_experts_writes_to_its_own_rows_and_blocks_only(
    tmp_path: Path, device: Literal["cpu", "cuda"], num_rounds: int, sizes: dict[str, object]
) -> None:
    path = constructed_hybrid(tmp_path / "model", noise=NOISE, max_position_embeddings=160, **sizes)
    dtype: DtypeName = "bfloat16" if device == "cuda" else "float32"
    run_watched(path, device=device, dtype=dtype, num_rounds=num_rounds)


def mimo_of(folder: Path) -> Path:
    return constructed_mimo(folder / "model", noise=NOISE, max_position_embeddings=160)


def run_watched(
    path: Path,
    *,
    device: Literal["cpu", "cuda"],
    num_rounds: int,
    dtype: DtypeName = "float32",
    drafter: DrafterName = "mtp",
) -> Watch:
    config = EngineConfig(
        model_path=str(path),
        device=device,
        dtype=dtype,
        max_running=9,
        prefill_chunk=64,
        depth=3,
        drafter=drafter,
        mixed_above_tokens=12,
    )
    engine = LocalEngine(sized(config, num_blocks=30))
    watch = Watch(engine.engine)
    engine.loop = EngineLoop(engine.engine.scheduler, watch, engine.post)
    chance = random.Random(0)
    stems = [[chance.randrange(128) for _ in range(100)] for _ in range(3)]
    active: list[int] = []
    while watch.rounds < num_rounds:
        if len(active) < 14 and chance.random() < 0.5:
            active.append(submit_random(engine, chance, stems))
        if active and chance.random() < 0.02:
            engine.loop._scheduler.abort(active.pop(chance.randrange(len(active))))
        engine.step()
        active = [i for i in active if engine.outputs[i].finish_reason is None]
    stats = engine.engine.scheduler.snapshot()
    least = 0.2 if drafter == "mtp" else 0.01  # the text hardly ever repeats itself
    assert least < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert stats.num_preemptions > 10
    assert stats.num_cached_prompt_tokens > 400
    assert watch.bystanders > min(100, 0.08 * num_rounds)
    assert watch.mixed > 0.05 * watch.rounds
    return watch


def submit_random(engine: LocalEngine, chance: random.Random, stems: list[list[int]]) -> int:
    prompt = [*chance.choice(stems)[: chance.randint(1, 90)], chance.randrange(128)]
    temperature = chance.choice([0.0, 0.7])
    is_plain = len(engine.outputs) % 100 < 50  # for a while all are: beside others no prompt shares a round
    return engine.submit(
        prompt,
        max_tokens=chance.randint(1, 60),
        sampling=SamplingParams(
            temperature=temperature,
            seed=chance.getrandbits(64),
            presence_penalty=0.0 if is_plain else chance.choice([0.0, 0.5]),
            bad_words_token_ids=[] if is_plain else chance.choice([[], [[3, 9], [11]]]),
        ),
        stop_token_ids=[7],
        max_draft_tokens=chance.choice([None, None, 0, 2]),
    )


def sized(config: EngineConfig, *, num_blocks: int) -> EngineConfig:
    """With memory for that many blocks."""
    spec, facts = read_model_spec(config.model_path), DeviceFacts.of(wanted_device(config))
    size = resolve(config, announced(config, spec, facts, 1 << 34)).block_bytes
    return msgspec.structs.replace(config, kv_cache_memory_bytes=num_blocks * size)
