"""Models of random weights: a folder with config.json alone is enough, and what they compute is sane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import mimo_config, qwen2_config
from headway_testing.local import LocalEngine
from headway_testing.paged import PagedSequences

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading import checkpoint
from headway.engine.loading.checkpoint import make_dummy_model
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError
from headway.engine.speculation.select import announced_head

SHAPES = Path(checkpoint.__file__).parents[1] / "bench/shapes"


def folder_of(path: Path, config: dict[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def dummy(path: Path, *, dtype: str = "float64", with_draft_head: bool = True) -> ModelPair:
    device = torch.device("cpu")
    make_draft = announced_head(read_model_spec(path)) if with_draft_head else None
    return make_dummy_model(path, device=device, dtype=dtype, make_draft=make_draft, progress=lambda _: None)


def test_every_weight_is_drawn_and_every_norm_is_one(tmp_path: Path) -> None:
    model = dummy(folder_of(tmp_path, mimo_config(hidden_size=96)))
    for name, tensor in model.tensors().items():
        if name.endswith("norm"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            spread = 4 * 0.02 / (2 * tensor.numel()) ** 0.5  # four standard errors
            assert abs(tensor.std().item() - 0.02) < spread, name


def test_the_weights_are_the_same_at_each_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, mimo_config())
    first, second = dummy(folder).tensors(), dummy(folder).tensors()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert not torch.equal(first["layers.0.feed_forward.up.weight"], first["layers.1.feed_forward.up.weight"])


def test_activations_stay_small_in_bfloat16(tmp_path: Path) -> None:
    config = mimo_config(num_hidden_layers=36, hidden_size=512, intermediate_size=1376)
    model = dummy(folder_of(tmp_path, config), dtype="bfloat16").target
    sequences = PagedSequences(model, num_rows=1, max_tokens=64)
    with torch.inference_mode():
        hidden = sequences.forward([(0, 0, 64)], torch.arange(64) % 151)
        logits = model.logits(hidden)
    assert hidden.isfinite().all()
    assert hidden.abs().max() < 100
    assert 0.01 < logits.std() < 10


@pytest.mark.parametrize(
    ("config", "with_draft_head", "has_draft_head"),
    [
        (mimo_config(), True, True),
        (mimo_config(), False, False),
        (mimo_config(num_nextn_predict_layers=0), True, False),
        (qwen2_config(), True, False),
    ],
    ids=["mimo", "depth-0", "no-head-announced", "qwen2"],
)
def test_there_is_a_head_where_the_config_announces_one(
    config: dict[str, object], with_draft_head: bool, has_draft_head: bool, tmp_path: Path
) -> None:
    models = dummy(folder_of(tmp_path, config), with_draft_head=with_draft_head)
    assert (models.draft is not None) == has_draft_head


def test_an_engine_of_dummy_weights_generates_what_was_asked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, mimo_config())
    engine = LocalEngine(EngineConfig(model_path=str(folder), load_format="dummy", depth=2, max_running=2))
    assert len(engine.generate(range(20), max_tokens=30)) == 30


def test_a_dummy_too_large_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, mimo_config())
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match="1000 bytes are available on cpu"):
        dummy(folder)


@pytest.mark.parametrize(
    ("name", "step_bytes", "num_draft_layers"),
    [
        ("mimo-7b", 14.00e9, 1),
        ("mimo-0.5b", 1.015e9, 1),
        ("qwen3-8b", 15.136e9, 0),
        ("llama-8b", 15.010e9, 0),
    ],
)
def test_the_shapes_have_the_sizes_that_are_measured(
    name: str, step_bytes: float, num_draft_layers: int
) -> None:
    """step_bytes: of the matrices that a step without drafts reads."""
    spec = read_model_spec(SHAPES / name)
    model = CausalLM(spec, Placement(torch.device("meta"), torch.bfloat16))
    assert sum(linear.weight.nbytes for linear in model.linears()) == pytest.approx(step_bytes, rel=1e-3)
    assert (0 if spec.draft_head is None else spec.draft_head.num_layers) == num_draft_layers
