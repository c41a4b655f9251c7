"""Predicted outputs in a running engine: what is drafted of them, how many rounds they save, and no text that
they change."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.local import LocalEngine
from headway_testing.ngrams import predicted_drafts

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.ngram import MAX_NGRAM, MAX_PREDICTED_NGRAM, NgramDrafter
from headway.engine.state.row_tensors import RowTensors


def config_of(path: Path, **changes: object) -> EngineConfig:
    fixed = {"model_path": str(path), "device": "cpu", "dtype": "float64", "depth": 3, "drafter": "ngram"}
    return EngineConfig(**(fixed | {"kv_cache_memory_bytes": 1 << 24} | changes))  # type: ignore[arg-type]


def rounds_of(engine: LocalEngine) -> int:
    return sum(engine.engine.scheduler.snapshot().row_rounds_by_emitted_tokens.values())


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "times"), [(0.0, 2.5), (1.0, 3.0)])
def test_a_predicted_output_with_one_line_changed_takes_few_rounds(temperature: float, times: float) -> None:
    """A round has 9 tokens at most. The greedy text repeats itself so much that n-grams alone give 2.7."""
    demo = Path(str(files("headway.engine.demo")))
    changes = {"dtype": "float32", "depth": 8, "kv_cache_memory_bytes": 1 << 26}
    sampling = SamplingParams(temperature=temperature, seed=5)
    prompt = heldout_prompts()[7][:40]
    plain = LocalEngine(config_of(demo, **changes))
    output = plain.generate(prompt, max_tokens=400, sampling=sampling)
    changed = [*output[:200], *output[3:10], *output[212:]]
    engine = LocalEngine(config_of(demo, **changes))
    request = engine.submit(prompt, max_tokens=400, sampling=sampling, prediction=changed)
    engine.run()
    assert engine.outputs[request].token_ids == output
    found = rounds_of(engine), rounds_of(plain)
    assert found[0] * times <= found[1], found


def test_predictions_are_drafted_in_crowds_and_change_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than rows and too few blocks for them, so that rows move, are preempted and are given to
    others; every second request predicts nothing."""
    random_mimo(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 12, (1 + 5 * i % 40,), generator=generator).tolist() for i in range(8)]
    samplings = [SamplingParams(temperature=0.3 * (seed % 2), seed=seed) for seed in range(8)]
    plain = LocalEngine(config_of(tmp_path, drafter="none"))
    texts = [
        plain.generate(prompt, max_tokens=60, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    predictions = [
        [*text[:20], *text[25:40], 1, *text[40:]] if seed % 4 < 2 else [] for seed, text in enumerate(texts)
    ]
    seen: list[tuple[int, int, list[int]]] = []
    propose = NgramDrafter.propose

    def told(drafter: NgramDrafter, rows: RowTensors, depth: int) -> torch.Tensor:
        drafts = propose(drafter, rows, depth)
        for row in (rows.kv_lengths < rows.limits).nonzero()[:, 0].tolist():
            seen.append((int(rows.seeds[row]), int(rows.kv_lengths[row]), drafts[row].tolist()))
        return drafts

    monkeypatch.setattr(NgramDrafter, "propose", told)
    blocks = 14
    engine = LocalEngine(
        config_of(tmp_path, max_model_len=128, max_running=4,
                  kv_cache_memory_bytes=blocks * 16 * (3 * 2 * 2 * 16 * 8 + 4)),
        reads_late=True,
    )  # fmt: skip
    requests = [
        engine.submit(prompt, max_tokens=60, sampling=sampling, prediction=prediction)
        for prompt, sampling, prediction in zip(prompts, samplings, predictions, strict=True)
    ]
    engine.run()
    assert [engine.outputs[request].token_ids for request in requests] == texts
    snapshot = engine.engine.scheduler.snapshot()
    assert snapshot.num_preemptions > 0
    for seed, length, drafts in seen:
        whole = [*prompts[seed], *texts[seed]][: length + 1]
        assert drafts == predicted_drafts(
            whole, len(prompts[seed]), predictions[seed], len(drafts), MAX_NGRAM, MAX_PREDICTED_NGRAM
        )
    assert {seed for seed, _, _ in seen} == set(range(8))
