"""MiMo without its MTP head against transformers' Qwen2; the head is tested in layers/test_mtp_head.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from headway_testing.families import COMMON_VARIANTS, assert_logits_of_transformers, save, tiny_model

ARCHITECTURE = "MiMoForCausalLM"


@pytest.mark.parametrize("changes", COMMON_VARIANTS.values(), ids=COMMON_VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))
