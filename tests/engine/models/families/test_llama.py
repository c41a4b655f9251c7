"""Llama, with and without biases, against transformers' LlamaForCausalLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from headway_testing.families import COMMON_VARIANTS, assert_logits_of_transformers, save, tiny_model

ARCHITECTURE = "LlamaForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    **COMMON_VARIANTS,
    "biased": {"attention_bias": True, "mlp_bias": True},
    "large epsilon": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))
