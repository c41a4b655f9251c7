"""An engine whose model several processes compute writes what it writes alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest
from headway_testing.crowd import random_sampling
from headway_testing.local import LocalEngine

from headway.engine.build import measured_policy
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.grammar.compile import regex_source
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.grammar import Grammar, TokenTable

MODEL = str(files("headway.engine.demo"))
VOCAB_SIZE = 4096
TABLE = TokenTable([bytes([i]) if 32 <= i < 127 else b"" for i in range(VOCAB_SIZE)], [0], [0])
DIGITS = Grammar(regex_source("[0-9]{1,30}"))
NUM_REQUESTS, NUM_BLOCKS, BLOCK_BYTES = 40, 26, 131_072
LENGTH = 256  # context in tokens


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ranks may share a GPU, where there is but one."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return str(request.param)


@contextmanager
def engine_of(size: int, device: str, **changes: Any) -> Iterator[LocalEngine]:
    """With about as many blocks whatever the number of ranks, each of which has its share of every block."""
    memory = NUM_BLOCKS * BLOCK_BYTES // size // (2 if device == "cuda" else 1)
    fields = {
        "depth": 3,
        "max_running": 8,
        "kv_cache_memory_bytes": memory,
        "max_model_len": LENGTH,
    } | changes
    if device == "cpu":
        fields["threads"] = 1
    config = EngineConfig(model_path=MODEL, device=device, tensor_parallel_size=size, **fields)
    engine = LocalEngine(config, token_table=TABLE)
    try:
        yield engine
    finally:
        if engine.engine.ranks is not None:
            engine.engine.ranks.close()


def answers_of(engine: LocalEngine) -> list[object]:
    """Texts and log-probabilities of requests of every kind, of which eight run at once. Some of the plain
    ones have a grammar."""
    chance, texts = random.Random(5), heldout_prompts()
    for index in range(NUM_REQUESTS):
        engine.submit(
            chance.choice(texts[:12])[: chance.randint(1, 80)],
            max_tokens=chance.choice([1, 5, 20, 60]),
            sampling=random_sampling(chance, is_plain=index % 2 == 0),
            max_draft_tokens=chance.choice([0, 1, None, None]),
            grammar=DIGITS if index % 8 == 0 else None,
        )
    outputs = engine.run().values()
    return [
        (output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs)
        for output in outputs
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"chooses_depth": True},
        pytest.param({"drafter": "ngram", "depth": 4}, marks=pytest.mark.slow),
        pytest.param({"drafter": "mtp,ngram"}, marks=pytest.mark.slow),
        pytest.param({"depth": 0, "prefix_caching": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_write_what_one_writes(changes: dict[str, Any], device: str) -> None:
    found = []
    for size in (1, 2):
        with engine_of(size, device, **changes) as engine:
            engine.engine.runner.capture(range(engine.engine.info.depth + 1), progress=lambda _: None)
            # Two ranks on one GPU take milliseconds for a gather, which would make the measuring long.
            if changes.get("chooses_depth") and device == "cpu":
                engine.engine.scheduler.set_depth_policy(measured_policy(engine.engine))
            found.append(answers_of(engine))
            assert engine.engine.info.num_ranks == size
            stats = engine.engine.scheduler.snapshot()
            assert stats.num_preemptions > 0
    assert len(found[0]) == NUM_REQUESTS
    assert found[0] == found[1]
