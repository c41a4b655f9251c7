"""`headway quantize`: what is written reads as the rounded weights, close to those before; the rest stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import mimo_config, random_mimo, random_qwen2, random_tensors, write_folder
from headway_testing.hybrid import HybridOracle
from headway_testing.oracle import Oracle
from headway_testing.paged import load_pair
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.engine.loading.formats import FORMATS, float8_blocks, integers, packed
from headway.engine.models.registry import FAMILY_OF
from headway.engine.quantize import folder as quantize_folder_module
from headway.engine.quantize.__main__ import main

# Of random normal weights, relative to their norm: bits of the format decide.
LARGEST_ERROR = {"fp8": 0.03, "int8": 0.01, "int4": 0.12}
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def parameters(folder: Path, dtype: str = "float64") -> dict[str, torch.Tensor]:
    models = load_pair(folder, dtype=dtype)
    names = FAMILY_OF[models.target.spec.architecture].names(models.target.spec)
    return {names.of(path): tensor for path, tensor in models.tensors().items()}


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Reads the words as bytes, the lowest first."""
    whole = words.contiguous().view(torch.uint8).int()
    if bits == 4:
        whole = torch.stack([whole % 16, whole // 16], -1).flatten(-2)
    return whole - (1 << (bits - 1))


@pytest.mark.parametrize("name", FORMATS)
def test_a_written_folder_reads_as_its_codes_times_their_scales(name: str, tmp_path: Path) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype="bfloat16", **WIDE)
    assert main([str(source), str(tmp_path / "own"), "--format", name]) == 0
    before, after = parameters(source), parameters(tmp_path / "own")
    stored = load_file(tmp_path / "own/model.safetensors")
    changed = [key for key in before if not torch.equal(before[key].bfloat16(), after[key].bfloat16())]
    assert changed, "weights are rounded"
    for key in changed:
        layer = key.removesuffix("weight")
        scale, shape = stored[f"{layer}weight_scale"].float(), before[key].shape
        if name == "fp8":
            by_element = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
            codes = stored[key].float()
        else:
            by_element = scale.repeat_interleave(shape[1] // scale.shape[1], 1)
            codes = unpacked(stored[f"{layer}weight_packed"], int(name[3:])).float()
        assert torch.equal(after[key], (codes * by_element).bfloat16().double()), key
        assert (after[key] - before[key]).norm() < LARGEST_ERROR[name] * before[key].norm(), key
    kept = json.loads((tmp_path / "own/config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.mtp_layers.0.input_proj"} <= set(kept)
    assert not {f"{layer}.weight" for layer in kept} & set(changed)


def test_the_scale_of_four_bits_loses_no_more_than_that_of_the_greatest_weight() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    parts = integers(weight, 4, 128)
    found = unpacked(parts["weight_packed"], 4) * parts["weight_scale"].repeat_interleave(128, 1)
    groups = weight.view(64, 2, 128)
    whole = groups.abs().amax(2, keepdim=True) / 7
    plain = ((groups / whole).round() * whole).view(64, 256)
    assert (found - weight).square().sum() < 0.95 * (plain - weight).square().sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_have_the_first_code_in_their_lowest_bits(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 40), dtype=torch.int32)
    assert torch.equal(unpacked(packed(codes, bits), bits)[:, :40] + (1 << (bits - 1)), codes)


def test_blocks_are_ragged_at_the_edges_and_may_be_all_zero() -> None:
    weight = torch.randn(130, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[128:, 256:] = 0
    parts = float8_blocks(weight)
    assert parts["weight_scale"].shape == (2, 3)
    assert bool((parts["weight_scale"] > 0).all())
    assert bool((parts["weight"][128:, 256:].float() == 0).all())
    assert parts["weight"][:128, :128].float().abs().max() >= 440, (
        "a block's greatest weight has the greatest code"
    )


def test_large_models_are_written_in_shards_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype="bfloat16", **WIDE)
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(quantize_folder_module, "SHARD_BYTES", 50_000)
    assert main([str(source), str(tmp_path / "shards")]) == 0
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "shards").glob("*"))
    assert len(set(index["weight_map"].values())) > 2
    assert {file.name for file in files if file.suffix == ".safetensors"} == set(index["weight_map"].values())
    assert (tmp_path / "shards/tokenizer.json").read_text() == "{}"
    whole, shards = parameters(tmp_path / "whole"), parameters(tmp_path / "shards")
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_four_bits_leave_weights_whose_inputs_are_no_whole_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = random_mimo(tmp_path / "source", **WIDE | {"intermediate_size": 200})
    assert main([str(source), str(tmp_path / "own"), "--format", "int4"]) == 0
    kept = json.loads((tmp_path / "own/config.json").read_text())["quantization_config"]["ignore"]
    assert any(layer.endswith("mlp.down_proj") for layer in kept)
    assert f"{len(kept)} linear layers stay as they are" in capsys.readouterr().out


def test_gates_of_delta_nets_and_convolutions_stay(tmp_path: Path) -> None:
    source = HybridOracle().save(tmp_path / "source")
    assert main([str(source), str(tmp_path / "own")]) == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "own/model.safetensors")
    quantized = {name.removesuffix("_scale") for name in after if name.endswith("weight_scale")}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in quantized} == {
        "in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - quantized)
    assert any(name.startswith("mtp.layers.0.") for name in quantized)


def test_lm_head_is_quantized_where_that_is_wanted(tmp_path: Path) -> None:
    source = random_qwen2(tmp_path / "source", tie_word_embeddings=False, **WIDE)
    assert main([str(source), str(tmp_path / "own"), "--quantize-lm-head", "--format", "int8"]) == 0
    assert "lm_head.weight_packed" in load_file(tmp_path / "own/model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tied", "is its embedding"),
        ("again", "is quantized already (compressed-tensors)"),
        ("full", "holds a model already"),
        ("missing", "does not exist"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mimo_config(tie_word_embeddings=True) if change == "tied" else mimo_config()
    source = write_folder(tmp_path / "source", config, random_tensors(config, with_draft_head=True))
    target = tmp_path / "own"
    if change == "again":
        assert main([str(source), str(tmp_path / "first")]) == 0
        source = tmp_path / "first"
    if change == "full":
        target = source
    if change == "missing":
        source = tmp_path / "nowhere"
    capsys.readouterr()
    assert main([str(source), str(target), *(["--quantize-lm-head"] if change == "tied" else [])]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headway: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore")  # of the library's
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    source = Oracle(dtype=torch.float32, **WIDE).save(tmp_path / "source", with_head=False)
    assert main([str(source), str(tmp_path / "own"), "--format", name]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    model(torch.tensor([[1, 2, 3]]))  # what expands its weights
    theirs = model.state_dict()
    own = parameters(tmp_path / "own")
    assert [key for key in own if not torch.equal(theirs[key].double(), own[key])] == []


@pytest.mark.filterwarnings("ignore")
def test_a_tied_lm_head_is_told_to_readers(tmp_path: Path) -> None:
    source = Oracle(dtype=torch.float32, tie_word_embeddings=True, **WIDE).save(
        tmp_path / "source", with_head=False
    )
    assert main([str(source), str(tmp_path / "own")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    model(torch.tensor([[1, 2, 3]]))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_weights_of_zeros_have_scales_that_float16_can_hold() -> None:
    weight = torch.zeros(128, 256, dtype=torch.float16)
    for parts in (float8_blocks(weight), integers(weight, 4, 128), integers(weight, 8, 256)):
        assert bool((parts["weight_scale"] > 0).all())


@pytest.mark.parametrize(
    ("left", "form", "said"),
    [
        ("model.safetensors", "fp8", "holds a model already, or a part of one"),
        ("3.part", "fp8", "holds a model already, or a part of one"),
        (None, "int4", "no weight of"),
    ],
)
def test_nothing_is_written_into_a_part_of_a_model_or_without_a_weight(
    left: str | None, form: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = random_mimo(tmp_path / "source"), tmp_path / "own"
    if left is not None:
        target.mkdir()
        (target / left).touch()
    assert main([str(source), str(target), "--format", form]) == 1
    assert said in capsys.readouterr().err
    assert not (target / "config.json").exists()


def test_folders_of_templates_are_copied_and_weights_in_folders_are_not(tmp_path: Path) -> None:
    source = random_mimo(tmp_path / "source", torch_dtype="bfloat16", **WIDE)
    for path in ("templates/tools.jinja", "original/consolidated.pth", ".cache/lock"):
        (source / path).parent.mkdir()
        (source / path).write_text("{}")
    assert main([str(source), str(tmp_path / "own"), "--format", "fp8"]) == 0
    assert (tmp_path / "own/templates/tools.jinja").read_text() == "{}"
    assert not (tmp_path / "own/original/consolidated.pth").exists()
    assert not (tmp_path / "own/.cache").exists()
