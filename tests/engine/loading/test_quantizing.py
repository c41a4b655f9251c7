"""`--quantize`: weights have the values of the folder that `headway quantize` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.hybrid import HybridOracle, one_by_one, packed, rewrite

from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.formats import FORMATS
from headway.engine.protocol.config import Quantize, QuantizeFormat
from headway.engine.protocol.errors import ModelError
from headway.engine.quantize.__main__ import main

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def loaded(folder: Path, quantize: Quantize) -> ModelPair:
    return load_model(
        folder, device=CPU, dtype="float64", make_draft=MtpHead, progress=lambda _: None, quantize=quantize
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_a_written_folder(name: QuantizeFormat, dtype: str, tmp_path: Path) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype=dtype, **WIDE)
    assert main([str(source), str(tmp_path / "own"), "--format", name, "--quantize-lm-head"]) == 0
    written = loaded(tmp_path / "own", Quantize()).tensors()
    found = loaded(source, Quantize(name, with_lm_head=True)).tensors()
    assert found.keys() == written.keys()
    assert all(torch.equal(tensor, written[path]) for path, tensor in found.items())
    plain = loaded(source, Quantize()).tensors()
    changed = {path for path in plain if not torch.equal(plain[path], found[path])}
    assert {"lm_head.weight", "layers.0.feed_forward.down.weight", "mtp.0.attention.query.weight"} <= changed
    assert not {
        path for path in changed if "norm" in path or path == "embedding" or path == "mtp.0.input.weight"
    }


def test_random_weights_are_quantised_and_the_same_at_each_start(tmp_path: Path) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype="bfloat16", **WIDE)

    def drawn() -> dict[str, torch.Tensor]:
        return make_dummy_model(
            source,
            device=CPU,
            dtype="float64",
            make_draft=MtpHead,
            progress=lambda _: None,
            quantize=Quantize("fp8"),
        ).tensors()

    first, second = drawn(), drawn()
    assert all(torch.equal(tensor, second[path]) for path, tensor in first.items())
    down = first["layers.0.feed_forward.down.weight"]
    assert 0 < down.std() < 0.1
    assert len(down.unique()) < down.numel() / 8, "few values are left of random ones"


def test_what_cannot_be_quantised_is_said(tmp_path: Path) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype="bfloat16", **WIDE)
    assert main([str(source), str(tmp_path / "own"), "--format", "fp8"]) == 0
    with pytest.raises(ModelError, match=r"--quantize is int4, but the weights of .* are quantized already"):
        loaded(tmp_path / "own", Quantize("int4"))
    tied = random_mimo(tmp_path / "tied", tie_word_embeddings=True, **WIDE)
    with pytest.raises(ModelError, match="leave out --quantize-lm-head"):
        loaded(tied, Quantize("fp8", with_lm_head=True))
    narrow = random_mimo(tmp_path / "narrow", hidden_size=64, intermediate_size=96)
    with pytest.raises(ModelError, match="take another --quantize than int4"):
        loaded(narrow, Quantize("int4"))


@pytest.mark.parametrize("layout", [packed, one_by_one], ids=["packed", "one by one"])
def test_experts_are_those_of_a_written_folder(
    layout: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """In the trunk and in the MTP head; a gate shares no block of scales with what it multiplies."""
    source = HybridOracle(architecture="Qwen3_5MoeForCausalLM").save(tmp_path / "source")
    rewrite(source, layout)
    assert main([str(source), str(tmp_path / "own"), "--format", "fp8"]) == 0
    written = loaded(tmp_path / "own", Quantize()).tensors()
    found = loaded(source, Quantize("fp8")).tensors()
    plain = loaded(source, Quantize()).tensors()
    assert found.keys() == written.keys() == plain.keys()
    assert [path for path in found if not torch.equal(found[path], written[path])] == []
    changed = {path for path in plain if not torch.equal(plain[path], found[path])}
    assert {"layers.0.feed_forward.experts.gate_up", "mtp.0.feed_forward.experts.down"} <= changed
    assert "layers.0.feed_forward.shared.up.weight" in changed
    assert not {path for path in changed if "router" in path or "shared_gate" in path}
