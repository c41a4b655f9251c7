"""Rounds without drafts leave no hole: after a spell of them the drafter stands where it would without the
spell, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, random_mimo
from headway_testing.local import LocalEngine, Output

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.mtp import BLOCK_CARRIES, BLOCK_HIDDEN, MtpDrafter
from headway.engine.state.row_tensors import RowTensors

VOCAB, BLOCK, DEPTH = 128, 16, 3
_chance = random.Random(2)
RANDOM_SPELLS = [(_chance.randint(0, DEPTH), _chance.choice((1, 1, 1, 2, 20))) for _ in range(60)]
Drafts = dict[tuple[int, int], list[int]]  # by the row's seed and L


LONG = pytest.mark.long
MODELS = {"accepted-1": ("accepted", 1), "random-1": ("random", 1)}
MODELS |= {"accepted-3": ("accepted", 3), "random-3": ("random", 3)}
# (depth, steps) in turn, and the tokens of each request.
SPELLS = {
    "short": ([(3, 6), (0, 23), (3, 3), (0, 9), (2, 7), (0, 2), (1, 5)], 180),
    "middle": ([(0, 90), (3, 5), (0, 70)], 300),
    "few-drafts": ([(1, 50), (3, 4), (1, 21), (0, 20), (1, 9), (3, 2), (2, 30)], 180),
    "random": (RANDOM_SPELLS[:20], 120),
    "more-random": (RANDOM_SPELLS, 180),
    "500": ([(3, 9), (0, 500)], 640),
    "500-of-depth-1": ([(3, 9), (1, 500)], 900),
}
MARKS = {("accepted-1", "short"): (), ("random-3", "random"): pytest.mark.slow}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose drafts are often right, and models whose MTP layers' keys depend on all that they read."""
    path = tmp_path_factory.mktemp("spells") / "model"
    kind, num_layers = request.param
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 1024, "num_nextn_predict_layers": num_layers}
    is_constructed = kind == "accepted"
    return constructed_mimo(path, noise=0.1, **sizes) if is_constructed else random_mimo(path, **sizes)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The last proposals for each live row and length."""
    seen: Drafts = {}
    propose = MtpDrafter.propose

    def noting(drafter: MtpDrafter, rows: RowTensors, depth: int) -> torch.Tensor:
        proposed = propose(drafter, rows, depth)
        is_live = (rows.kv_lengths < rows.limits).tolist()
        found = zip(rows.seeds.tolist(), rows.kv_lengths.tolist(), proposed.tolist(), strict=True)
        seen.update({(s, n): line for (s, n, line), lives in zip(found, is_live, strict=True) if lives})
        return proposed

    monkeypatch.setattr(MtpDrafter, "propose", noting)
    return seen


def engine_of(model: Path) -> LocalEngine:
    return LocalEngine(
        EngineConfig(
            model_path=str(model), device="cpu", dtype="float32", depth=DEPTH, drafter="mtp", block_size=BLOCK,
            max_running=8, kv_cache_memory_bytes=1 << 24,
        )
    )  # fmt: skip


def generate(
    model: Path,
    prompts: list[list[int]],
    max_tokens: int,
    spells: list[tuple[int, int]],
    *,
    late: bool = False,
    num_seeds: int = 4,
) -> tuple[LocalEngine, list[Output]]:
    """spells: (depth, steps) in turn; the rest at full depth. late: half of the prompts come after the first
    two spells."""
    engine = engine_of(model)
    scheduler = engine.engine.scheduler
    num_first = len(prompts) // 2 if late else len(prompts)

    def submit(first: int, end: int) -> None:
        for index in range(first, end):
            seed = index % num_seeds
            sampling = SamplingParams(temperature=0.3 * (seed % 2), seed=seed)
            engine.submit(prompts[index], max_tokens=max_tokens, sampling=sampling)

    submit(0, num_first)
    for number, (depth, num_steps) in enumerate(spells):
        if number == 2:
            submit(num_first, len(prompts))
        scheduler.set_depth(depth)
        for _ in range(num_steps):
            engine.step()
    scheduler.set_depth(DEPTH)
    if len(spells) < 3:
        submit(num_first, len(prompts))
    engine.run()
    return engine, list(engine.outputs.values())


def published(engine: LocalEngine) -> dict[bytes, list[torch.Tensor]]:
    """The MTP layers' entries, and what the drafter keeps, of every published block, by the block's key."""
    pool, blocks = engine.engine.runner.pool, engine.engine.scheduler.state.blocks
    spec = engine.engine.runner.model.spec
    assert spec.draft_head is not None
    layers = [pool.draft_layer(index) for index in range(spec.draft_head.num_layers)]
    kept = [tensor for state in layers for tensor in state.values()]
    kept += [pool.drafter[name] for name in (BLOCK_HIDDEN, BLOCK_CARRIES) if name in pool.drafter]
    return {
        blocks._keys[i]: [tensor[i].clone() for tensor in kept]
        for i in range(pool.num_blocks)
        if blocks.is_published(i)
    }


def assert_equal_blocks(
    found: dict[bytes, list[torch.Tensor]], wanted: dict[bytes, list[torch.Tensor]]
) -> int:
    """Blocks of both are equal to the last bit in every slot. Returns their number."""
    common = found.keys() & wanted.keys()
    for key in common:
        for one, other in zip(found[key], wanted[key], strict=True):
            assert torch.equal(one, other), "some slots differ"
    return len(common)


@pytest.mark.parametrize(
    ("model", "spells", "max_tokens"),
    [
        pytest.param(kind, *SPELLS[name], id=f"{label}-{name}", marks=MARKS.get((label, name), LONG))
        for label, kind in MODELS.items()
        for name in SPELLS
    ],
    indirect=["model"],
)
def test_a_spell_without_drafts_leaves_no_trace(
    model: Path, drafts: Drafts, spells: list[tuple[int, int]], max_tokens: int
) -> None:
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in (5, 16, 33, 47)]
    usual, wanted = generate(model, prompts, max_tokens, [])
    wanted_drafts = dict(drafts)
    drafts.clear()
    changed, found = generate(model, prompts, max_tokens, spells)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    common = drafts.keys() & wanted_drafts.keys()
    assert len(common) > 20
    for key in common:
        length = min(len(drafts[key]), len(wanted_drafts[key]))
        assert drafts[key][:length] == wanted_drafts[key][:length], key
    assert assert_equal_blocks(published(changed), published(usual)) >= len(prompts) * (
        max_tokens // BLOCK - 5
    )


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(kind, id=label, marks=() if label == "random-3" else LONG)
        for label, kind in MODELS.items()
    ],
    indirect=True,
)
def test_a_prefix_found_during_a_spell_gives_the_same_text(model: Path, drafts: Drafts) -> None:
    chance = random.Random(1)
    first = [[chance.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    _, alone = generate(model, first, 80, [])
    again = [[*prompt, *output.token_ids[:70]] for prompt, output in zip(first, alone, strict=True)]
    _, wanted = generate(model, again, 40, [])
    _, found = generate(model, [*first, *again], 80, [(0, 72), (3, 4), (0, 20)], late=True, num_seeds=3)
    assert [o.token_ids for o in found[:3]] == [o.token_ids for o in alone]
    assert [o.token_ids[:40] for o in found[3:]] == [o.token_ids for o in wanted]
    assert all(output.events[0].num_cached >= 64 for output in found[3:])
