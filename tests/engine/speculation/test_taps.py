"""A drafter that reads hidden states of the target between layers gets transformers' own, of every token, and
changes no text."""

from __future__ import annotations

import random
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from headway_testing.drafters import Guessing
from headway_testing.families import tiny_model
from headway_testing.local import LocalEngine
from headway_testing.padded import PaddedLaunches

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.layers.causal_lm import TargetStates
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.drafter import NoDrafter, PromptTokens
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import RoundWindow

VOCAB, TAPS, TOLERANCE = 151, (1, 2), 1e-4


class Tapping(Guessing):
    """Keeps the tapped states and the last one of each token, by the row's seed and the position."""

    taps: tuple[int, ...] = TAPS

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.seen: dict[tuple[int, int], torch.Tensor] = {}  # [taps + 1, hidden] each
        self.table: RowTensors | None = None

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        assert self.table is not None, "the engine's rows are not known"
        found = zip(prompts.rows, prompts.first_places, prompts.last_places, prompts.lengths, strict=True)
        for row, first, last, length in found:
            for place in range(int(first), int(last) + 1 if length > 0 else 0):
                self._note(self.table.seeds[row], prompts.inputs.positions[place], states, place)

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        for row, place in window.is_valid.nonzero().tolist():
            flat = row * window.token_ids.shape[1] + place
            self._note(rows.seeds[row], window.positions[row, place], states, flat)

    def _note(self, seed: torch.Tensor, position: torch.Tensor, states: TargetStates, place: int) -> None:
        kept = torch.stack([*(tap[place] for tap in states.taps), states.last[place]])
        self.seen[int(seed), int(position)] = kept


def run(drafter: Guessing, folder: Path, *, is_padded: bool = False) -> list[list[int]]:
    """Returns prompts with outputs; seeds are numbers of requests. The last prompt finds a cached prefix."""
    engine = LocalEngine(
        EngineConfig(
            model_path=str(folder), device="cpu", dtype="float32", depth=3, drafter="ngram", max_running=3,
            prefill_chunk=32, mixed_above_tokens=0, kv_cache_memory_bytes=1 << 24,
        ),
        drafter=drafter,
    )  # fmt: skip
    runner = engine.engine.runner
    if isinstance(drafter, Tapping):
        drafter.table = runner.rows
    if is_padded:
        PaddedLaunches(runner, StepGrid(row_counts(3), prompt_counts=(16, 32), mixed_counts=(16, 32)))
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in (1, 40, 17, 70)]
    prompts.append(prompts[1][:36] + prompts[2])
    for seed, prompt in enumerate(prompts):
        engine.submit(prompt, max_tokens=12, sampling=SamplingParams(temperature=seed % 2, seed=seed))
        engine.step()
    outputs = engine.run()
    return [[*prompt, *outputs[i].token_ids] for i, prompt in enumerate(prompts)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny_model(request.param, num_hidden_layers=4).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("folder", ["Qwen2ForCausalLM"], indirect=True)
def test_taps_are_transformers_states_of_every_token_and_change_no_text(
    folder: Path, is_padded: bool
) -> None:
    theirs = tiny_model("Qwen2ForCausalLM", num_hidden_layers=4)
    drafter = Tapping()
    texts = run(drafter, folder, is_padded=is_padded)
    assert texts == run(Guessing(VOCAB), folder, is_padded=is_padded)
    last: list[torch.Tensor] = []
    theirs.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    num_seen = 0
    for seed, text in enumerate(texts):
        with torch.no_grad():
            states = theirs(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        wanted = torch.stack([*(states[tap][0] for tap in TAPS), last.pop()], 1)
        for position in range(len(text) - 1):
            if (seed, position) in drafter.seen:
                difference = (drafter.seen[seed, position] - wanted[position]).abs().max()
                assert difference < TOLERANCE, (seed, position)
                num_seen += 1
    assert num_seen == sum(len(text) - 1 for text in texts) - 32  # two blocks of the last prompt were cached


class Repeating(NoDrafter):
    """Drafts the last token again. Waits for no GPU, so that a graph can hold it."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        return rows.last_tokens[:, None].expand(-1, depth).contiguous()


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)]
)
def test_taps_change_no_text_of_the_embedded_model(device: str, dtype: str) -> None:
    """On a GPU in captured graphs, whose fused additions a tap ends."""
    texts = []
    for taps in ((), (2, 3, 4)):
        engine = LocalEngine(
            EngineConfig(
                model_path=str(files("headway.engine.demo")), device=device, dtype=dtype, depth=2, drafter="ngram",  # type: ignore[arg-type]
                max_running=4, kv_cache_memory_bytes=1 << 26,
            ),
            drafter=Repeating(taps),
        )  # fmt: skip
        engine.engine.runner.capture(range(3), progress=lambda _: None)
        for seed, prompt in enumerate(heldout_prompts()[:6]):
            sampling = SamplingParams(temperature=0.8 * (seed % 2), seed=seed)
            engine.submit(prompt[: 40 + 9 * seed], max_tokens=32, sampling=sampling)
        texts.append([output.token_ids for output in engine.run().values()])
    assert texts[0] == texts[1]
