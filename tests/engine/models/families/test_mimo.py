"""MiMo without its MTP head against transformers' Qwen2; the head is tested in layers/test_mtp_head.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from headway_testing.families import ROPES, assert_logits_of_transformers, save, tiny_model

ARCHITECTURE = "MiMoForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))
