"""What is read of a config.json about quantised weights: formats, lists of layers, and every refusal."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headway.engine.models.quantization import INSTEAD, MAX_PATTERNS, Quantization, read_quantization
from headway.engine.protocol.errors import ModelError

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
LAYER = "model.layers.11.self_attn.k_proj"


def read(config: object) -> Quantization | None:
    return read_quantization({"quantization_config": config}, ModelError)


def keeps(*kept: str, layer: str = LAYER, **config: object) -> bool:
    found = read(INT4 | {"ignore": list(kept)} | config)
    assert found is not None
    return found.keeps(layer)


@pytest.mark.parametrize(
    "name",
    [
        LAYER, "self_attn.k_proj", "k_proj", "self_attn", "model.layers.11", "layers.11.self_attn",
        "model.language_model.layers.11.self_attn.k_proj", "language_model.model.layers.11",
        "model.layers.11.self_attn.qkv_proj", "self_attn.qkv_proj", "*self_attn*", "model.layers.11.*",
        "re:.*self_attn.k_proj$", "re:.*k_proj", "re:model.layers", r"re:^model\.layers\.1[0-3]\..*", r"re:.*\.\d\d\.self_attn",
    ],
)  # fmt: skip
def test_a_list_names_a_layer(name: str) -> None:
    assert keeps("lm_head", name)


@pytest.mark.parametrize(
    "name",
    [
        "proj", "model.layers.1", "self_attn.q_proj", "lm_head", "model", "layers.1.self_attn", "*.mlp.*", "re:self_attn.k_proj",
        "re:.*k_pro$", r"re:^model\.layers\.[0-9]\.", "re:[", "re:(a+)+$", "re:.*(k|q)_proj", r"re:.*\.\d+\.self_attn",
    ],
)  # fmt: skip
def test_a_list_does_not_name_a_layer(name: str) -> None:
    assert not keeps("lm_head", name)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_lists_of_transformers_may_hold_regular_expressions(method: str) -> None:
    found = read({"quant_method": method, "modules_to_not_convert": [r".*self_attn\.k_proj", "visual.*"]})
    assert found is not None
    assert (found.keeps(LAYER), found.keeps("model.visual.blocks.0.attn.qkv")) == (True, True)
    assert not found.keeps("model.layers.0.self_attn.q_proj")


def test_layers_that_gptq_leaves_out_are_kept() -> None:
    config = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*k_proj": {}, "+:.*q_proj": {"bits": 8}}}
    found = read(config)
    assert found is not None
    assert (found.keeps(LAYER), found.keeps("model.layers.0.self_attn.q_proj")) == (True, False)


@pytest.mark.parametrize(
    ("change", "lists_all"),
    [
        ({"ignore": ["lm_head", "re:.*k_proj"]}, True),
        ({"ignore": ["re:.*(k|q)_proj"]}, False),
        ({"config_groups": {"group_0": GROUP | {"targets": ["re:.*down_proj"]}}}, False),
    ],
    ids=["plain", "a-pattern-that-is-not-read", "targets"],
)
def test_a_list_is_whole_only_where_all_of_it_is_understood(change: dict[str, Any], lists_all: bool) -> None:
    found = read(INT4 | change)
    assert found is not None
    assert found.lists_all == lists_all


REFUSED: list[tuple[object, str]] = [
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, INSTEAD["nvfp4"]),
    ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, INSTEAD["mxfp4"]),
    ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, INSTEAD["mxfp8"]),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, INSTEAD["marlin"]),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, INSTEAD["nvfp4"]),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, INSTEAD["nvfp4"]),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, INSTEAD["mxfp8"]),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, INSTEAD["mixed_precision"]),
    ({"quant_method": "modelopt_fp4"}, "unquantized checkpoint"),
    ({"quant_method": "mxfp4"}, INSTEAD["mxfp4"]),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, INSTEAD["bitsandbytes"]),
    ({"quant_method": "gguf"}, INSTEAD["gguf"]),
    ({"quant_method": "quanto"}, INSTEAD["quanto"]),
    ({"quant_method": "quark"}, INSTEAD["quark"]),
    ({"quant_method": "gptq_marlin"}, INSTEAD["marlin"]),
    ({"quant_method": "machete"}, INSTEAD["machete"]),
    ({"quant_method": "gptq", "bits": 3}, "gptq, gptq with 3 bits"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, INSTEAD["marlin"]),
    ({"quant_method": "gptq", "format": "bitblas"}, "bitblas"),
    ({"quant_method": "gptq", "is_marlin_format": True}, INSTEAD["marlin"]),
    ({"quant_method": "awq", "version": "gemv"}, "gemv"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "llm-awq"),
    ({"quant_method": "awq", "bits": 8}, "8 bits"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transforms of weights"),
    (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (INT4 | {"config_groups": {"a": GROUP | {"weights": {"num_bits": 3}}, "b": GROUP}}, "3 bits"),
    (INT4 | {"config_groups": {"a": GROUP | {"weights": {"strategy": "attn_head"}}}}, "attn_head"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_format_that_is_not_read_is_refused_with_what_to_take_instead(config: object, told: str) -> None:
    with pytest.raises(ModelError, match=r"quantized.*which is not read; served are fp8") as caught:
        read(config)
    assert told in str(caught.value)
    assert "the model's unquantized checkpoint" in str(caught.value)


HOSTILE: list[tuple[object, str]] = [
    ("fp8", "quantization_config"),
    (["fp8"], "quantization_config"),
    ({}, "quant_method"),
    ({"quant_method": None}, "quant_method"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128, 10**30]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": "128x128"}, "weight_block_size"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ({"quant_method": "fp8", "ignored_layers": [1]}, "ignored_layers"),
    (INT4 | {"config_groups": None}, "config_groups"),
    (INT4 | {"config_groups": {"a": None}}, "config_groups"),
    (INT4 | {"config_groups": {"a": {"weights": {"num_bits": "4"}}}}, "num_bits"),
    (INT4 | {"config_groups": {"a": {"weights": {"block_structure": [0, 0]}}}}, "block_structure"),
    (INT4 | {"ignore": {"lm_head": 1}}, "ignore"),
    (INT4 | {"ignore": ["re:" + "a*" * 1000]}, "patterns"),
    (INT4 | {"ignore": [f"*{i}" for i in range(MAX_PATTERNS + 1)]}, "1,001 patterns"),
    ({"quant_method": "gptq", "bits": 10**30}, "bits"),
    ({"quant_method": "gptq", "bits": True}, "bits"),
    ({"quant_method": "gptq", "dynamic": [1]}, "dynamic"),
    ({"quant_method": "gptq", "group_size": "128"}, "group_size"),
    ({"quant_method": "q" * 100_000}, "not read"),
]


@pytest.mark.parametrize(("config", "told"), HOSTILE, ids=lambda value: str(value)[:60])
def test_a_hostile_value_is_named(config: object, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(config)
    assert told in str(caught.value)
    assert "quantization_config" in str(caught.value)
    assert len(str(caught.value)) < 1_500


def test_patterns_that_never_end_are_not_tried() -> None:
    name = "a" * 200
    patterns = ["re:(a+)+$", "re:(a|aa)+$", "re:" + ".*a" * 100 + "b", "*a" * 200 + "b", "re:([a-z]*)*!"]
    start = time.thread_time()
    assert not any(keeps(*patterns, layer=f"{name}.{name}") for _ in range(20))
    assert time.thread_time() - start < 5


def test_older_packs_write_the_sizes_of_a_block_as_text() -> None:
    def read(block: object) -> Quantization:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
        found = read_quantization({"quantization_config": config}, ModelError)
        assert found is not None
        return found

    assert read("128x64").blocks == read([128, 64]).blocks == ((128, 64),)
    for broken in ("128", "128x0", "axb", "1x2x3"):
        with pytest.raises(ModelError, match="cannot be read"):
            read(broken)


def test_a_pack_whose_cache_alone_is_quantised_has_weights_as_they_are() -> None:
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_quantization({"quantization_config": config}, ModelError) is None


def test_a_name_that_ends_in_a_dot_stands_for_the_layers_below() -> None:
    config = {"quant_method": "awq", "modules_to_not_convert": ["model.layers.0.", "visual."]}
    found = read_quantization({"quantization_config": config}, ModelError)
    assert found is not None
    assert found.keeps("model.layers.0.mlp.up_proj")
    assert not found.keeps("model.layers.1.mlp.up_proj")
