"""Experts as checkpoints store them: packed, one by one or quantised; what is missing, doubled or of another
shape is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import HybridOracle, one_by_one, packed, rewrite
from headway_testing.inspection import edit, inspect
from headway_testing.packs import FP8, Format, formats, fp8_blocks, write_packs
from headway_testing.paged import PagedSequences, load_pair
from headway_testing.ranks import run_ranks
from safetensors.torch import load_file

from headway.engine.bench.shape import SHAPES
from headway.engine.inspection import memory
from headway.engine.layers.group import ALONE, Group
from headway.engine.loading import checkpoint, placing
from headway.engine.loading.arranging import StackedExperts
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.headers import parameter_counts
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import Quantize
from headway.engine.protocol.errors import ModelError
from headway.engine.speculation.select import announced_head
from headway.kernels import ExpertWeights, expanded_expert

Tensors = dict[str, torch.Tensor]
TRUNK, HEAD = "model.layers.1.mlp.experts.", "mtp.layers.0.mlp.experts."
ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The trunk's experts are stored one by one, those of the head packed."""
    return HybridOracle(architecture="Qwen3_5MoeForCausalLM").save(tmp_path / "model")


def parameters(folder: Path, **options: object) -> Tensors:
    return load_pair(folder, dtype="float64", **options).tensors()  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [packed, one_by_one], ids=["packed", "one-by-one"])
def test_all_layouts_give_the_same_parameters(layout: Callable[[Tensors], Tensors], folder: Path) -> None:
    mixed = parameters(folder)
    assert mixed.keys() >= {"layers.1.feed_forward.experts.gate_up", "mtp.0.feed_forward.experts.down"}
    found = parameters(rewrite(folder, layout))
    assert found.keys() == mixed.keys()
    assert [path for path in mixed if not torch.equal(found[path], mixed[path])] == []


def test_experts_are_read_some_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and up of one, or the downward projections of two: 18,432 bytes in float64, half of it as they
    are stored."""
    wanted, read = parameters(folder), StackedExperts.__getitem__
    num_bytes: list[int] = []

    def watched(self: StackedExperts, places: slice) -> torch.Tensor:
        found = read(self, places)
        num_bytes.append(found.nbytes)
        return found

    monkeypatch.setattr(StackedExperts, "__getitem__", watched)
    monkeypatch.setattr(checkpoint, "BYTES_AT_ONCE", 20_000)
    found = parameters(folder)
    assert [path for path in wanted if not torch.equal(found[path], wanted[path])] == []
    of_trunk = [t for path, t in wanted.items() if ".experts." in path and path.startswith("layers.")]
    assert max(num_bytes) == 2 * 24 * 48 * 4
    assert sum(num_bytes) == sum(t.numel() for t in of_trunk) * 4


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda t: [t.pop(f"{TRUNK}3.up_proj.weight"), t.pop(f"{TRUNK}0.down_proj.weight")],
            f"lacks 2 tensors: {TRUNK}3.up_proj.weight, {TRUNK}0.down_proj.weight; fetch the weights again",
        ),
        (lambda t: t.pop(f"{HEAD}down_proj"), f"lacks 1 tensors: {HEAD}down_proj; fetch the weights again, or"),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith(TRUNK)],
            f"lacks 2 tensors: {TRUNK}gate_up_proj, {TRUNK}down_proj",
        ),
        (
            lambda t: t.update({f"{TRUNK}down_proj": torch.zeros(7, 48, 24)}),
            f"1 tensors in two layouts: {TRUNK}down_proj; fetch the weights again into",
        ),
        (
            lambda t: t.update({f"{HEAD}2.gate_proj.weight": torch.zeros(24, 48)}),
            f"1 tensors in two layouts: {HEAD}gate_up_proj; fetch the weights again into",
        ),
        (
            lambda t: t.update({f"{TRUNK}7.gate_proj.weight": torch.zeros(24, 48)}),
            f"has 1 tensors that the architecture of its config.json does not have: {TRUNK}7.gate_proj.weight",
        ),
        (
            lambda t: t.update({f"{TRUNK}5.up_proj.weight": torch.zeros(23, 48)}),
            f"another shape than config.json says: {TRUNK}5.up_proj.weight is [23, 48], not [24, 48]",
        ),
        (
            lambda t: t.update({f"{HEAD}gate_up_proj": torch.zeros(7, 24, 48)}),
            f"{HEAD}gate_up_proj is [7, 24, 48], not [7, 48, 48]",
        ),
        (
            lambda t: t.update({f"{TRUNK}6.down_proj.weight": torch.zeros(48, 24, dtype=torch.int8)}),
            f"of a dtype that is not supported: {TRUNK}6.down_proj.weight is I8",
        ),
    ],
    ids=["missing", "missing-packed", "none", "doubled", "doubled-in-part", "one-too-many", "shape", "packed-shape", "dtype"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_told_by_the_names_of_its_tensors(
    damage: Callable[[Tensors], object], told: str, folder: Path
) -> None:
    edit(folder, damage)
    with pytest.raises(ModelError, match=re.escape(told)):
        parameters(folder)


def test_a_head_that_lacks_an_expert_is_told_and_can_be_left_out(folder: Path) -> None:
    name = f"{HEAD}4.gate_proj.weight"
    rewrite(folder, one_by_one)
    edit(folder, lambda t: t.pop(name))
    with pytest.raises(ModelError, match="serve without the draft head"):
        parameters(folder)
    assert load_pair(folder, with_draft_head=False).draft is None
    report = inspect(folder).draft_head
    assert (report.state, report.missing_tensors) == ("incomplete", [name])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda t, name: t.pop(name), "lacks 1 tensors: {}; fetch"),
        (lambda t, name: t.update({name: torch.zeros(200, 48)}), "{} is [200, 48], not [208, 48]"),
        (
            lambda t, name: t.update({name.replace("qkvz", "qkv"): torch.zeros(136, 48)}),
            "has 1 tensors in two layouts: model.layers.0.linear_attn.in_proj_qkv.weight; fetch",
        ),
    ],
    ids=["missing", "shape", "doubled"],
)
def test_projections_by_head_are_told_by_the_names_of_their_tensors(
    damage: Callable[[Tensors, str], object], told: str, tmp_path: Path
) -> None:
    folder = HybridOracle(architecture="Qwen3NextForCausalLM").save(tmp_path)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    edit(folder, lambda t: damage(t, name))
    with pytest.raises(ModelError, match=re.escape(told.format(name))):
        parameters(folder)


@pytest.mark.parametrize("architecture", ["Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_blocks_of_float8_load_as_the_weights_that_they_stand_for(architecture: str, tmp_path: Path) -> None:
    """Of each expert, as the official packs have them, with a bf16 router and gates of the shared expert."""
    dense = HybridOracle(architecture=architecture).save(tmp_path / "dense")
    rewrite(dense, one_by_one)
    blocks = Format(FP8 | {"weight_block_size": [32, 32]}, fp8_blocks(torch.bfloat16, block=(32, 32)))
    pack, twin = write_packs(dense, tmp_path, blocks, quantizes_head=True)
    stored = load_file(pack / "model.safetensors").keys()
    assert {f"{TRUNK}6.up_proj.weight_scale_inv", f"{HEAD}0.down_proj.weight_scale_inv"} <= stored
    assert "model.layers.0.mlp.gate.weight_scale_inv" not in stored
    found, wanted = parameters(pack), parameters(twin)
    assert [path for path in wanted if not torch.equal(found[path], wanted[path])] == []
    report = inspect(pack)
    assert report.problem is None
    assert report.num_expanded == sum(name.endswith("_scale_inv") for name in stored)


# All inputs are 128.
EVEN = {
    "hidden_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_attention_heads": 8,
    "linear_num_value_heads": 4, "linear_value_head_dim": 32,
}  # fmt: skip
BLOCKS = Format(FP8 | {"weight_block_size": [128, 128]}, fp8_blocks(torch.bfloat16))


@pytest.mark.parametrize(
    ("form", "bits"),
    [(lambda: BLOCKS, 8), (formats()["ct int4 g128, zeros"], 4), (formats()["ct int4 channel"], 4)],
    ids=["fp8", "int4", "int4-channel"],
)
@pytest.mark.parametrize("architecture", ["Qwen3_5MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_codes_of_experts_give_the_logits_of_the_dequantised_folder(
    architecture: str, form: Callable[[], Format], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, by the twins of the kernels; linear layers of 128 inputs are expanded."""
    dense = save(tiny_model(architecture, **EVEN), architecture, tmp_path / "dense")
    logits = []
    for folder, is_coded in zip(write_packs(dense, tmp_path, form()), (True, False), strict=True):
        monkeypatch.setattr(placing, "reads_codes", lambda device: True)
        models = load_pair(folder, dtype="bfloat16")
        layers = list(models.experts())
        assert len(layers) == len(models.target.layers)
        assert {layer.is_quantized for layer in layers} == {is_coded}
        assert {matrix.bits for layer in layers for matrix in layer.weights} == {bits if is_coded else 16}
        assert not any(linear.is_quantized for linear in models.linears())
        sequences, tokens = PagedSequences(models, 1, 40), torch.arange(40)
        logits.append(models.target.logits(sequences.forward([(0, 0, 40)], tokens)))
    assert torch.equal(*logits)


@pytest.mark.parametrize("form", [lambda: BLOCKS, formats()["ct int4 g128, zeros"]], ids=["fp8", "int4"])
def test_ranks_keep_the_codes_of_their_outputs(
    form: Callable[[], Format], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their experts together are those of one rank."""
    dense = HybridOracle(architecture="Qwen3_5MoeForCausalLM", vocab_size=152, **EVEN).save(
        tmp_path / "dense"
    )
    pack, _ = write_packs(dense, tmp_path, form())
    monkeypatch.setattr(placing, "reads_codes", lambda device: True)

    def experts_of(group: Group) -> list[ExpertWeights]:
        models = load_model(
            pack, device=torch.device("cpu"), dtype="bfloat16", make_draft=None, progress=lambda _: None, group=group
        )  # fmt: skip
        return [layer.weights for layer in models.experts()]

    (alone, *_), ranks = experts_of(ALONE), [layers[0] for layers in run_ranks(2, experts_of)]
    for expert in range(alone.gate_up.shape[0]):
        halves = [expanded_expert(rank.gate_up, expert).chunk(2) for rank in ranks]
        joined = torch.cat([torch.cat(parts) for parts in zip(*halves, strict=True)])
        assert torch.equal(joined, expanded_expert(alone.gate_up, expert))
        joined = torch.cat([expanded_expert(rank.down, expert) for rank in ranks])
        assert torch.equal(joined, expanded_expert(alone.down, expert))
    assert {matrix.bits for rank in ranks for matrix in rank} == {alone.down.bits} != {16}


def test_codes_that_stay_need_no_memory_for_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 bits, and 4 bytes for 128 codes: the weights of experts and projections take 33/64."""
    dense = save(tiny_model("Qwen3MoeForCausalLM", **EVEN), "Qwen3MoeForCausalLM", tmp_path / "dense")
    pack, twin = write_packs(dense, tmp_path, BLOCKS)
    stored = load_file(pack / "model.safetensors")
    num_codes = sum(t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn)
    whole = load_pair(twin, dtype="bfloat16").outline()
    needed = parameter_counts(whole)[1] - num_codes * 31 // 32
    monkeypatch.setattr(placing, "reads_codes", lambda device: True)
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: needed + whole.target.rotary_bytes - 1)
    with pytest.raises(ModelError, match="lower --max-model-len"):
        load_pair(pack, dtype="bfloat16")
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: needed + whole.target.rotary_bytes)
    assert load_pair(pack, dtype="bfloat16").target.layers
    with pytest.raises(ModelError, match="available on cpu"):
        load_pair(twin, dtype="bfloat16")
    assert load_pair(twin, dtype="bfloat16", quantize=Quantize("fp8")).target.layers
    seen: list[int] = []
    monkeypatch.setattr(memory, "check_memory", lambda *_, saved_bytes: seen.append(saved_bytes))
    assert all(inspect(folder, gpu_memory=2 << 30).engine for folder in (pack, twin))
    assert inspect(twin, gpu_memory=2 << 30, quantize="fp8").engine
    assert inspect(twin, gpu_memory=2 << 30, quantize="fp8", load_format="dummy").engine
    assert seen == [num_codes * 31 // 32, 0, num_codes * 31 // 32, num_codes * 31 // 32]


def test_an_inspection_refuses_what_a_start_does_not_quantise(tmp_path: Path) -> None:
    pack, _ = write_packs(
        save(tiny_model("Qwen3MoeForCausalLM", **EVEN), "Qwen3MoeForCausalLM", tmp_path / "dense"),
        tmp_path,
        BLOCKS,
    )
    with pytest.raises(ModelError) as error:
        load_pair(pack, dtype="bfloat16", quantize=Quantize("int4"))
    assert "are quantized already" in str(error.value)
    assert inspect(pack, quantize="int4").problem == str(error.value)


def test_experts_of_which_one_has_other_codes_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last expert of a layer has a scale that bfloat16 lacks."""
    dense = save(tiny_model("Qwen3MoeForCausalLM", **EVEN), "Qwen3MoeForCausalLM", tmp_path / "dense")
    exact = Format(BLOCKS.config, fp8_blocks(torch.float32))
    pack, twin = write_packs(dense, tmp_path, Format(BLOCKS.config, BLOCKS.quantize, by_layer={f"{TRUNK}6.up": exact.quantize}))  # fmt: skip
    monkeypatch.setattr(placing, "reads_codes", lambda device: True)
    first, second, third = load_pair(pack, dtype="bfloat16").experts()
    kinds = [[matrix.bits for matrix in layer.weights] for layer in (first, second, third)]
    assert kinds == [[8, 8], [16, 8], [8, 8]]
    (_, wanted, _) = load_pair(twin, dtype="bfloat16").experts()
    assert torch.equal(second.weights.gate_up.values, wanted.weights.gate_up.values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dummy_weights_are_drawn_for_all_experts(architecture: str, tmp_path: Path) -> None:
    spec = read_model_spec(save(tiny_model(architecture), architecture, tmp_path))
    models = make_dummy_model(
        tmp_path,
        device=torch.device("cpu"),
        dtype="float64",
        make_draft=announced_head(spec),
        progress=lambda _: None,
    )
    experts = models.tensors()["layers.1.feed_forward.experts.gate_up"]
    assert experts.std(dim=(1, 2)).allclose(torch.tensor(0.02).double(), rtol=0.1)
    assert not torch.equal(experts[0], experts[1])


def test_inspect_tells_of_all_parameters_and_of_those_that_a_token_meets(folder: Path) -> None:
    found = inspect(folder)
    stored = load_file(folder / "model.safetensors")
    assert found.num_parameters == sum(t.numel() for t in stored.values())
    # A token meets three of seven experts of a layer, of 3 x 24 x 48 weights, and no embedding.
    unmet = 5 * 4 * 3 * 24 * 48 + stored["model.embed_tokens.weight"].numel()
    of_vectors = sum(t.numel() for name, t in stored.items() if t.dim() == 1 or "conv1d" in name)
    assert found.num_active_parameters == found.num_parameters - unmet - of_vectors
    assert found.shape is not None
    assert found.shape.layers[0].feed_forward["kind"] == "experts"


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "mixtral-8x7b"])
def test_the_shapes_are_outlined_without_memory(name: str) -> None:
    found = inspect(SHAPES / name, gpu_memory=141 << 30, load_format="dummy", dtype="bfloat16")
    assert found.num_parameters is not None
    assert found.num_active_parameters is not None
    assert found.num_active_parameters < found.num_parameters / 3
    has_room = name != "qwen3-next-80b-a3b"  # of 163 GB
    assert (found.problem is None) == has_room, found.problem


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8), ("int4", 4)])
def test_experts_are_quantised_as_they_are_read(
    name: Literal["fp8", "int4"], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that stay stand for the values that they have where they are expanded; the router has none."""
    architecture = "Qwen3_5MoeForCausalLM"
    dense = save(tiny_model(architecture, **EVEN).bfloat16(), architecture, tmp_path)
    plain = load_pair(dense, dtype="bfloat16")
    expanded = load_pair(dense, dtype="bfloat16", quantize=Quantize(name))
    monkeypatch.setattr(placing, "reads_codes", lambda device: True)
    coded = load_pair(dense, dtype="bfloat16", quantize=Quantize(name))
    for before, values, codes in zip(plain.experts(), expanded.experts(), coded.experts(), strict=True):
        assert torch.equal(
            codes.tensors()["feed_forward.router.weight"], before.tensors()["feed_forward.router.weight"]
        )
        for own, wanted, found in zip(before.weights, values.weights, codes.weights, strict=True):
            assert (wanted.bits, found.bits) == (16, bits)
            assert not torch.equal(own.values, wanted.values)
            for expert in range(found.shape[0]):
                assert torch.equal(expanded_expert(found, expert), wanted.values[expert]), expert
