"""Mistral, with and without a window, against transformers' MistralForCausalLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headway_testing.checkpoints import TINY
from headway_testing.families import COMMON_VARIANTS, assert_logits_of_transformers, save, tiny_model

from headway.engine import ModelError, read_model_spec

ARCHITECTURE = "MistralForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    **COMMON_VARIANTS,
    "head_dim of hidden_size": {"head_dim": None},
    "large epsilon": {"rms_norm_eps": 1e-2},
    "no window": {"sliding_window": None},
    # One key, a block less one, a block, one more, all but one of the tokens, all, more than there are.
    **{f"window {size}": {"sliding_window": size} for size in (1, 15, 16, 17, 74, 75, 200)},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "leave layer_types out"),
        ({"attention_chunk_size": 64}, "attention_chunk_size is 64"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be a positive integer"),
    ],
)
def test_what_is_not_every_layers_window_is_refused(
    changes: dict[str, object], part: str, tmp_path: Path
) -> None:
    content = {**TINY, "architectures": [ARCHITECTURE], "model_type": "mistral", **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=part):
        read_model_spec(tmp_path)
