"""What a default engine takes of a GPU, and that its largest steps find room in the rest."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from headway_testing.local import LocalEngine

from headway.engine.bench.shape import SHAPES
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams

pytestmark = pytest.mark.gpu

LEAST_SHARE = 0.94
WISHES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "num_logprobs": 20, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
    {"temperature": 0.8, "top_k": 50, "num_prompt_logprobs": 5},
]


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    gc.collect()
    torch.cuda.empty_cache()
    config = EngineConfig(model_path=str(SHAPES / "mimo-7b"), load_format="dummy")
    engine = LocalEngine(config)
    engine.engine.runner.capture(range(engine.engine.info.depth + 1), progress=lambda _: None)
    yield engine
    del engine
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.timeout(600)
def test_a_default_engine_takes_nearly_all_memory_and_its_largest_steps_fit(engine: LocalEngine) -> None:
    """Contexts of all lengths fill the cache, with rows that are adjusted and scored; each size of a round
    comes twice, for which a graph is captured while there is room."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    info = engine.engine.info
    print(f"{1 - free / total:.2%} of {total / 2**30:.1f} GiB taken, {info.num_blocks:,} blocks")
    assert 1 - free / total >= LEAST_SHARE
    chance = random.Random(0)
    lengths = [info.max_model_len - 64] * 12 + [
        chance.randrange(1, 4000) for _ in range(info.max_running + 40)
    ]
    for number, length in enumerate(lengths):
        sampling = SamplingParams(seed=number, **WISHES[number % len(WISHES)])  # type: ignore[arg-type]
        prompt = [chance.randrange(info.vocab_size) for _ in range(length)]
        engine.submit(prompt, max_tokens=8 + number % 57, sampling=sampling)
    outputs = engine.run()
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.LENGTH}
    left = torch.cuda.mem_get_info()[0]
    print(f"{left / 2**30:.2f} GiB are free after the largest steps")
