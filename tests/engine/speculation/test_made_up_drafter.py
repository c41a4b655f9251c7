"""A drafter in one file: with weights, taps of the target, state by row and a vocabulary of its own. No other
module is told of it but by the tables of drafters."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import mimo_config
from headway_testing.local import LocalEngine
from headway_testing.paged import PagedSequences
from headway_testing.poison import PoisoningRunner

from headway.engine.layers.causal_lm import CausalLM, TargetStates
from headway.engine.layers.experts import Experts
from headway.engine.layers.linear import Linear
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.work import Work
from headway.engine.protocol.config import DraftLayers, DraftLmHead, EngineConfig
from headway.engine.protocol.drafters import DRAFTER_TRAITS, DrafterTraits
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.sampling.sampler import in_target_vocabulary, pick_tokens
from headway.engine.speculation.drafter import DrafterFamily, PromptTokens
from headway.engine.speculation.select import DRAFTERS
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import RowSpec, StateSpec
from headway.kernels import RoundWindow

VOCAB, TAPS, NUM_DRAFTED, DEPTH = 151, (1, 2), 100, 2
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:NUM_DRAFTED]
Proposals = list[tuple[int, int, int]]  # the row's seed, L and the first draft


class TapHead:
    """Scores the token after next by two taps and the next token's embedding."""

    num_layers = 1
    lm_head_shape = (NUM_DRAFTED, 48)

    def __init__(self, target: CausalLM, place: Placement) -> None:
        hidden = target.spec.hidden_size
        self._embedding = target.embedding
        self.hidden_size, self.dtype = hidden, target.dtype
        self.input = place.linear({"taps.input": hidden}, len(TAPS) * hidden)
        self.lm_head = place.linear({"taps.lm_head": NUM_DRAFTED}, hidden)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.input.tensors() | self.lm_head.tensors()

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.lm_head

    def experts(self) -> tuple[Experts, ...]:
        return ()

    def state(self, max_window: int) -> tuple[tuple[StateSpec, ...], ...]:
        return ((),)

    def work(self) -> Work:
        return Work.of(self.linears())

    def norms_by_linear(self) -> dict[Linear, tuple[RMSNorm, ...]]:
        return {}

    def choose_formats(self, lm_head: DraftLmHead, layers: DraftLayers) -> None:
        """Keeps those of the checkpoint."""

    def added_bytes(self, lm_head: DraftLmHead, layers: DraftLayers) -> int:
        return 0

    def logits(self, taps: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """taps: [n, 2 * hidden]. tokens: [n] int64. Returns [n, NUM_DRAFTED]."""
        return self.lm_head(self.input(taps) + self._embedding[tokens])


class TapDrafter:
    """Keeps of each row the taps of its last token that is in the cache."""

    traits = DrafterTraits("by taps")
    taps = TAPS

    def __init__(self, models: ModelPair, pool: StatePool, rows: RowTensors) -> None:
        assert isinstance(models.draft, TapHead)
        self.model, self._rows, self._kept = models.draft, rows, pool.drafter["taps"]
        self.seen: Proposals = []

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        logits = self.model.logits(self._kept[rows.state_ids], rows.last_tokens)
        spread = in_target_vocabulary(logits[:, None], IDS, VOCAB)
        drafts = pick_tokens(spread, rows, rows.kv_lengths + 1, rows.last_tokens[:, None][:, :0])
        for row in (rows.kv_lengths < rows.limits).nonzero()[:, 0].tolist():
            self.seen.append((int(rows.seeds[row]), int(rows.kv_lengths[row]), int(drafts[row])))
        return drafts.expand(-1, depth).contiguous()

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        ids = self._rows.state_ids[prompts.rows]
        self._kept[ids] = torch.cat(states.taps, 1)[prompts.last_places]

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        count = len(rows.limits)
        last = (rows.kv_lengths - window.start_positions - 1).clamp(0, window.token_ids.shape[1] - 1)
        taps = torch.cat(states.taps, 1).view(count, -1, self._kept.shape[1])[torch.arange(count), last]
        is_live = (rows.prefill_status == 0)[:, None]
        self._kept[rows.state_ids] = torch.where(is_live, taps, self._kept[rows.state_ids])

    def catch_up(self, rows: RowTensors) -> None:
        """Has nothing pending."""


def state_of(models: ModelPair, max_pending: int) -> tuple[StateSpec, ...]:
    target = models.target
    return (RowSpec("taps", (len(TAPS) * target.spec.hidden_size,), target.dtype, is_scratch=True),)


FAMILY = DrafterFamily(
    lambda models, pool, rows, max_depth: TapDrafter(models, pool, rows), state_of, TapHead
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Weights are drawn, those of the drafter, too; rows that belong to nobody are poisoned."""
    monkeypatch.setitem(DRAFTERS, "taps", FAMILY)  # type: ignore[misc]
    monkeypatch.setitem(DRAFTER_TRAITS, "taps", TapDrafter.traits)  # type: ignore[misc]
    (tmp_path / "config.json").write_text(json.dumps(mimo_config()))
    return LocalEngine(
        EngineConfig(
            model_path=str(tmp_path), device="cpu", dtype="float64", load_format="dummy", depth=DEPTH, drafter="taps",  # type: ignore[arg-type]
            max_running=3, prefill_chunk=32, kv_cache_memory_bytes=1 << 24,
        )
    )  # fmt: skip


def test_what_it_drafts_is_what_its_weights_say_of_the_targets_taps(engine: LocalEngine) -> None:
    """And the text is the target's own."""
    runner, chance = engine.engine.runner, random.Random(0)
    drafter = runner.launcher.context.drafter
    assert isinstance(drafter, TapDrafter)
    engine.loop._runner = PoisoningRunner(runner, engine.engine.scheduler)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in (1, 40, 17, 70, 33)]
    for seed, prompt in enumerate(prompts):
        engine.submit(prompt, max_tokens=15, sampling=SamplingParams(temperature=0.0, seed=seed))
    outputs = engine.run()
    texts = [[*prompt, *outputs[i].token_ids] for i, prompt in enumerate(prompts)]
    assert len(drafter.seen) > 40
    model = runner.model
    for seed, text in enumerate(texts):
        tokens, sequences = torch.tensor(text), PagedSequences(model, 1, len(text))
        inputs = sequences.inputs([(0, 0, len(text))], tokens)
        states = model.forward(inputs, sequences.pool, TAPS)
        said = model.logits(states.last).argmax(-1).tolist()
        assert text[len(prompts[seed]) :] == said[len(prompts[seed]) - 1 : -1]
        drafted = IDS[drafter.model.logits(torch.cat(states.taps, 1)[:-1], tokens[1:]).argmax(-1)].tolist()
        for _, length, draft in (entry for entry in drafter.seen if entry[0] == seed):
            assert draft == drafted[length - 1], (seed, length)


def test_its_weights_are_counted_and_its_layers_leave_those_of_the_target_alone(engine: LocalEngine) -> None:
    info, pool = engine.engine.info, engine.engine.runner.pool
    hidden = engine.engine.runner.model.spec.hidden_size
    of_target = sum(tensor.numel() for tensor in engine.engine.runner.model.tensors().values())
    assert info.num_parameters == of_target + hidden * (len(TAPS) * hidden + NUM_DRAFTED)
    assert pool.draft_layer(0) == {}
    assert [index for index, _ in pool.kinds()] == [0]
    assert pool.drafter["taps"].shape == (3, len(TAPS) * hidden)
    assert (info.depth, info.drafter, pool.has_row_state) == (DEPTH, "taps", False)
