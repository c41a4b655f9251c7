"""Folders that transformers saved, beside the models that it computes them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headway_testing.oracle import Oracle
from headway_testing.paged import load_pair

VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head-dim-of-hidden": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0},
    },
    "one-layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-2},
}
# The largest logit is about 10, with a tied embedding 20; float32 rounds at 1e-6 of that, float64 at 1e-15.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def pair(tmp_path: Path, dtype: torch.dtype) -> Callable[..., SimpleNamespace]:
    """(oracle, model loaded from the oracle's folder, tolerance) of a variant, with or without the head."""

    def make(variant: str, *, with_head: bool) -> SimpleNamespace:
        oracle = Oracle(dtype=dtype, **VARIANTS[variant])
        folder = oracle.save(tmp_path / variant, with_head=with_head)
        models = load_pair(folder, dtype=str(dtype).removeprefix("torch."))
        tolerance = TOLERANCES[dtype] * (2 if oracle.config.tie_word_embeddings else 1)
        return SimpleNamespace(
            oracle=oracle, models=models, model=models.target, head=models.draft, tolerance=tolerance
        )

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    """[75] int64: four blocks of 16 and a part."""
    return torch.randint(0, 151, (75,), generator=torch.Generator().manual_seed(3))
