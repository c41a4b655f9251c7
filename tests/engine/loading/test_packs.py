"""Quantised folders load as the dense folders that they were expanded to, to the last bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.hybrid import HybridOracle
from headway_testing.inspection import edit, inspect
from headway_testing.packs import (
    EVEN,
    FP8,
    RAGGED,
    Format,
    formats,
    fp8_blocks,
    gptq,
    mimo_packs,
    write_packs,
)
from headway_testing.paged import load_pair
from headway_testing.ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.linear import Linear
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.loading import packs, placing
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.models.registry import FAMILY_OF, read_model_spec
from headway.engine.protocol.errors import ModelError

HYBRID = RAGGED | {"num_hidden_layers": 4, "linear_value_head_dim": 16}
CPU = torch.device("cpu")
BLOCKS = Format(FP8 | {"weight_block_size": [128, 128]}, fp8_blocks(torch.bfloat16))


def parameters(
    folder: Path, *, dtype: Any = "float64", group: Group = ALONE, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """By the checkpoint's names."""
    has_head = read_model_spec(folder).draft_head is not None
    models: ModelPair = load_model(
        folder, device=device, dtype=dtype, make_draft=MtpHead if has_head else None, progress=lambda _: None, group=group
    )  # fmt: skip
    spec = models.target.spec
    names = FAMILY_OF[spec.architecture].names(spec)
    return {names.of(path): tensor for path, tensor in models.tensors().items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("name", formats())
def test_parameters_are_those_of_the_dequantised_folder(name: str, tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, formats()[name]())
    assert_equal(parameters(pack), parameters(twin))


@pytest.mark.parametrize("name", ["fp8 blocks, f32 scales", "ct int4 g32, f32", "gptq desc_act", "awq"])
def test_a_weight_may_be_expanded_in_pieces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 13 and of 14 outputs begin and end within blocks, and within words of codes."""
    pack, twin = mimo_packs(tmp_path, formats()[name]())
    monkeypatch.setattr(packs, "VALUES_AT_ONCE", 160 * 14 - 1)
    assert_equal(parameters(pack), parameters(twin))


@pytest.mark.gpu
@pytest.mark.parametrize("name", formats())
def test_a_gpu_expands_as_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, twin = mimo_packs(tmp_path, formats()[name]())
    monkeypatch.setattr(Linear, "finish", lambda *_: None)  # gives dense weights up
    monkeypatch.setattr(placing, "keeps_codes", lambda _: False)
    found = parameters(pack, dtype="bfloat16", device=torch.device("cuda"))
    assert_equal({name: tensor.cpu() for name, tensor in found.items()}, parameters(twin, dtype="bfloat16"))


@pytest.mark.parametrize("name", ["fp8 blocks, f32 scales", "ct int4 g32, zeros", "gptq desc_act", "awq"])
def test_ranks_load_their_rows(name: str, tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, formats()[name](), vocab_size=152)
    found = run_ranks(2, lambda group: parameters(pack, group=group))
    for rank, wanted in enumerate(run_ranks(2, lambda group: parameters(twin, group=group))):
        assert_equal(found[rank], wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("packed", [BLOCKS, gptq()], ids=["fp8", "gptq"])
def test_values_are_rounded_to_the_dtype_of_config_json_first(
    packed: Format, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever --dtype says: rounding once more is what the dense folder gets, too."""
    pack, twin = mimo_packs(tmp_path, packed)
    monkeypatch.setattr(Linear, "finish", lambda *_: None)  # gives dense weights up
    found, stored = parameters(pack, dtype=dtype), load_file(twin / "model.safetensors")
    assert_equal(found, parameters(twin, dtype=dtype))
    assert_equal(found, {name: stored[name].to(getattr(torch, dtype)) for name in found})


def test_tied_embeddings_stay_as_they_are(tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, BLOCKS, tie_word_embeddings=True)
    assert_equal(parameters(pack), parameters(twin))


def test_a_quantised_lm_head_is_compared_with_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    pack, _ = mimo_packs(tmp_path, BLOCKS)
    config = json.loads((pack / "config.json").read_text())
    (pack / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not load_pair(pack, dtype="float64").target.spec.tied


class TestHeads:
    """Each row of what published packs do with the tensors of the MTP head."""

    @pytest.mark.parametrize("sees_images", [False, True], ids=["text", "text-and-images"])
    @pytest.mark.parametrize(
        ("packed", "quantizes_head", "kept"),
        [
            (lambda: BLOCKS, True, lambda names: names),
            (lambda: BLOCKS, True, lambda names: [name.replace("model.language_model.", "model.") for name in names]),
            (lambda: BLOCKS, False, lambda names: [name for name in names if not name.startswith("mtp")]),
            (formats()["awq"], False, lambda names: [name for name in names if not name.startswith("mtp")]),
            (lambda: gptq(dynamic={"-:.*mtp.*": {}, "-:.*visual.*": {}}), False, lambda names: names),
            (formats()["ct int4 g32"], False, lambda names: names),
            (
                formats()["ct float channel"], False,
                lambda names: [*(n for n in names if "mtp.layers" not in n), "mtp.layers.0.self_attn.qkv_proj", "re:.*visual.*"],
            ),
        ],
        ids=[
            "fp8-with-bf16-fc", "listed-without-the-wrapper", "bf16-unlisted", "awq-unlisted", "gptq-excluded",
            "listed-unfused", "listed-fused",
        ],
    )  # fmt: skip
    def test_the_head_is_read_as_it_is_stored(
        self,
        packed: Callable[[], Format],
        quantizes_head: bool,
        kept: Callable[[list[str]], list[str]],
        sees_images: bool,
        tmp_path: Path,
    ) -> None:
        dense = HybridOracle(**HYBRID).save(tmp_path / "dense", sees_images=sees_images)
        pack, twin = write_packs(dense, tmp_path, packed(), quantizes_head=quantizes_head, kept=kept)
        is_coded = load_file(pack / "model.safetensors").keys() & {
            "mtp.layers.0.mlp.up_proj.weight_scale_inv"
        }
        assert bool(is_coded) == quantizes_head
        found = parameters(pack)
        assert any(name.startswith("mtp.") for name in found)
        assert_equal(found, parameters(twin))

    def test_a_dropped_head_is_told_and_the_rest_is_served(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        dense = HybridOracle(**HYBRID).save(tmp_path / "dense", with_head=False)
        pack, _ = write_packs(dense, tmp_path, BLOCKS)
        assert load_pair(pack).draft is None
        assert "announces a draft head of 1 layers, the weights have none" in caplog.text


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_blocks_are_dequantised_as_by_transformers(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    """Where no block is ragged: others transformers does not read."""
    pack, _ = mimo_packs(tmp_path, Format(BLOCKS.config, fp8_blocks(scale_dtype)), **EVEN)
    stored, found = load_file(pack / "model.safetensors"), parameters(pack)
    names = [name for name in stored if f"{name}_scale_inv" in stored]
    assert len(names) == 2 * 7
    for name in names:
        wanted = Fp8Dequantize(None)._dequantize_one(
            stored[name], stored[f"{name}_scale_inv"], output_dtype=torch.bfloat16
        )
        assert torch.equal(found[name], wanted.double())


def test_inspect_tells_what_is_stored_and_what_expanding_takes(tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, BLOCKS)
    found, wanted = inspect(pack), inspect(twin)
    assert found.problem is None
    assert found.quantization == "fp8"
    assert {one.dtype for one in found.stored} == {"F8_E4M3", "BF16"}
    assert [one.dtype for one in wanted.stored] == ["BF16"]
    assert (found.num_parameters, found.memory, found.floor) == (
        wanted.num_parameters,
        wanted.memory,
        wanted.floor,
    )
    assert found.num_expanded == 3 * 7


def test_inspect_tells_of_the_file_that_modelopt_wrote(tmp_path: Path) -> None:
    pack, _ = mimo_packs(tmp_path, formats()["modelopt fp8, legacy"]())
    assert inspect(pack).quantization == "modelopt"


def test_dummy_weights_are_drawn_for_the_dense_shape(tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, BLOCKS)
    found, wanted = (
        make_dummy_model(folder, device=CPU, dtype="float64", make_draft=None, progress=lambda _: None)
        for folder in (pack, twin)
    )
    assert_equal(found.tensors(), wanted.tensors())


def test_a_quantised_cache_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack, _ = mimo_packs(tmp_path, formats()["modelopt fp8, legacy"]())
    with caplog.at_level("INFO"):
        load_pair(pack)
    assert caplog.text.count("the KV cache stays as it is") == 1
    assert caplog.text.count("21 weights of modelopt stand for BF16") == 1


def test_a_folder_that_is_not_quantised_at_all_is_an_error(tmp_path: Path) -> None:
    _, twin = mimo_packs(tmp_path, BLOCKS)
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"quantization_config": dict(BLOCKS.config)}))
    with pytest.raises(ModelError, match="no tensor has a scale"):
        load_pair(twin)


def test_modelopt_may_give_the_scales_of_blocks_four_dimensions(tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, formats()["modelopt fp8 blocks"]())
    edit(
        pack,
        lambda t: t.update(
            {n: s[:, None, :, None].contiguous() for n, s in t.items() if n.endswith("scale")}
        ),
    )
    assert_equal(parameters(pack), parameters(twin))


def test_biases_of_zeros_that_gptq_writes_for_every_layer_are_left_out(tmp_path: Path) -> None:
    pack, twin = mimo_packs(tmp_path, gptq())
    bias = "model.layers.0.mlp.down_proj.bias"
    edit(pack, lambda t: t.update({bias: torch.zeros(t[bias.replace("bias", "qweight")].shape[1])}))
    assert_equal(parameters(pack), parameters(twin))
    edit(pack, lambda t: t.update({bias: t[bias] + 1}))
    with pytest.raises(ModelError, match=re.escape(bias)):
        parameters(pack)


def test_a_list_of_the_models_layers_is_none_of_the_heads(tmp_path: Path) -> None:
    """As of mixed packs that spare the first layers: those of the head have the same numbers."""
    dense = HybridOracle(**HYBRID).save(tmp_path / "dense")
    pack, twin = write_packs(dense, tmp_path, BLOCKS, quantizes_head=True)
    config = json.loads((pack / "config.json").read_text())
    tensors, exact = load_file(pack / "model.safetensors"), load_file(twin / "model.safetensors")
    spared = [
        n.removesuffix(".weight")
        for n in exact
        if n.startswith("model.layers.0.") and f"{n}_scale_inv" in tensors
    ]
    for layer in spared:
        tensors[f"{layer}.weight"] = exact[f"{layer}.weight"]
        del tensors[f"{layer}.weight_scale_inv"]
    save_file(tensors, pack / "model.safetensors")
    config["quantization_config"]["modules_to_not_convert"] += ["model.layers.0"]
    (pack / "config.json").write_text(json.dumps(config))
    assert spared
    assert_equal(parameters(pack), parameters(twin))
