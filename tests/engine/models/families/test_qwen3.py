"""Qwen3, with its norms of heads, against transformers' Qwen3ForCausalLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from headway_testing.families import ROPES, assert_logits_of_transformers, save, tiny_model

ARCHITECTURE = "Qwen3ForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "windows": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "biased": {"attention_bias": True},
    "large epsilon": {"rms_norm_eps": 1e-2},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))
