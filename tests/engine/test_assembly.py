"""What is decided from the configuration and the model when an engine is put together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headway.engine.assembly import _idle_prefill_chunk, _quantizes_draft_lm_head
from headway.engine.config import EngineConfig
from headway.engine.errors import ConfigError


def model(**changes: object) -> SimpleNamespace:
    """A 7B's measures on a GPU, of which nothing exists."""
    values = {
        "hidden": 4096,
        "vocab_size": 151_680,
        "dtype": torch.bfloat16,
        "device": "cuda",
        "has_mtp": True,
    }
    values |= changes
    shape = SimpleNamespace(hidden_size=values["hidden"], vocab_size=values["vocab_size"])
    device = torch.device(str(values["device"]))
    return SimpleNamespace(config=shape, dtype=values["dtype"], device=device, has_mtp=values["has_mtp"])


@pytest.mark.parametrize(
    ("head", "changes", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"vocab_size": 4096}, False),
        ("auto", {"device": "cpu"}, False),
        ("auto", {"dtype": torch.float32}, False),
        ("auto", {"hidden": 4100}, False),
        ("auto", {"has_mtp": False}, False),
        ("full", {}, False),
        ("int8", {"vocab_size": 4096}, True),
    ],
    ids=str,
)
def test_drafts_take_8_bits_where_that_pays(head: str, changes: dict[str, object], expected: bool) -> None:
    config = EngineConfig(model_path="", draft_lm_head=head)  # type: ignore[arg-type]
    assert _quantizes_draft_lm_head(config, model(**changes)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "bfloat16 on cpu with 4096, with drafts"),
        ({"hidden": 100}, "with 100"),
        ({"has_mtp": False}, "without drafts"),
    ],
    ids=str,
)
def test_8_bits_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _quantizes_draft_lm_head(EngineConfig(model_path="", draft_lm_head="int8"), model(**changes))  # type: ignore[arg-type]


def test_only_a_gpu_of_its_own_choice_takes_longer_chunks_while_idle() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert _idle_prefill_chunk(EngineConfig(model_path=""), gpu) == 2048
    assert _idle_prefill_chunk(EngineConfig(model_path=""), cpu) is None
    assert _idle_prefill_chunk(EngineConfig(model_path="", prefill_chunk=256), gpu) is None
