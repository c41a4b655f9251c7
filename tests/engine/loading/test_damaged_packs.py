"""Damaged quantised folders end a start in one line that names the tensor or the key, and soon."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.inspection import edit, inspect
from headway_testing.packs import formats, mimo_packs
from headway_testing.paged import load_pair

from headway.engine.protocol.errors import ModelError

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]
LAYER = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
SCALE, WEIGHT = f"{LAYER}.weight_scale_inv", f"{LAYER}.weight"
FP8, INT4, INT8 = "fp8 blocks, f32 scales", "ct int4 g32, zeros", "ct int8 channel"
GPTQ, AWQ, ORDER, TENSOR = "gptq desc_act", "awq", "ct int4 g32, order", "fp8 tensors"
LEGACY = "modelopt fp8, legacy"
SECONDS = 5.0


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def add(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def first_is(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return make


def swap(one: str, other: str) -> Change:
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def scalar(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.flatten()[:size]


# By what is damaged: the format, the change, what the error names.
TENSORS: dict[str, tuple[str, Change, str]] = {
    "fp8: no scale": (FP8, drop(SCALE), WEIGHT),
    "fp8: no scale in the head": (FP8, drop("model.mtp_layers.0.mlp.up_proj.weight_scale_inv"), "model.mtp_layers.0.mlp.up_proj.weight"),
    "fp8: no scale anywhere": (FP8, lambda t: [t.pop(n) for n in list(t) if n.endswith("_scale_inv")], "_proj.weight"),
    "fp8: no weight": (FP8, drop(WEIGHT), WEIGHT),
    "fp8: two scales": (FP8, add(f"{LAYER}.weight_scale", torch.ones(1)), WEIGHT),
    "fp8: scales transposed": (FP8, put(f"{UP}.weight_scale_inv", lambda s: torch.ones(2, 3)), UP),
    "fp8: scales cut": (FP8, put(SCALE, lambda s: s[:, :1]), SCALE),
    "fp8: one scale for all blocks": (FP8, put(f"{UP}.weight_scale_inv", lambda s: s[:1, :1]), UP),
    "fp8: a scale without dimensions": (FP8, put(SCALE, lambda s: s[0, 0]), SCALE),
    "fp8: three dimensions of scales": (FP8, put(SCALE, lambda s: s[None]), SCALE),
    "fp8: no scales in the tensor": (FP8, put(SCALE, lambda s: s[:0]), SCALE),
    "fp8: NaN": (FP8, put(SCALE, first_is(float("nan"))), SCALE),
    "fp8: zero": (FP8, put(SCALE, first_is(0.0)), SCALE),
    "fp8: infinite": (FP8, put(SCALE, first_is(float("inf"))), SCALE),
    "fp8: no exponent": ("fp8 blocks, uint8 scales", put(SCALE, first_is(255)), SCALE),
    "fp8: integer scales": (FP8, put(SCALE, lambda s: s.int()), SCALE),
    "fp8: float64 scales": (FP8, put(SCALE, lambda s: s.double()), SCALE),
    "fp8: swapped": (FP8, swap(SCALE, WEIGHT), WEIGHT),
    "fp8: e5m2": (FP8, put(WEIGHT, lambda w: w.float().to(torch.float8_e5m2)), WEIGHT),
    "fp8: int8": (FP8, put(WEIGHT, lambda w: w.view(torch.int8)), WEIGHT),
    "fp8: dense beside a scale": (FP8, put(WEIGHT, lambda w: w.bfloat16()), WEIGHT),
    "fp8: weight cut": (FP8, put(WEIGHT, lambda w: w[:90]), WEIGHT),
    "fp8: one dimension": (FP8, put(WEIGHT, lambda w: w.flatten()), WEIGHT),
    "fp8: no outputs": (FP8, put(WEIGHT, lambda w: w[:0]), WEIGHT),
    "fp8: dense and without a scale": (FP8, lambda t: (drop(SCALE)(t), put(WEIGHT, lambda w: w.bfloat16())(t)), LAYER),
    "fp8 tensor: a scale of blocks": (TENSOR, put(f"{LAYER}.weight_scale", lambda s: torch.ones(1, 2)), f"{LAYER}.weight_scale"),
    "fp8 tensor: zero": (TENSOR, put(f"{LAYER}.weight_scale", torch.zeros_like), f"{LAYER}.weight_scale"),
    "fp8: packed, too": (FP8, add(f"{LAYER}.weight_packed", torch.zeros(96, 20, dtype=torch.int32)), LAYER),
    "int8: scales cut": (INT8, put(f"{LAYER}.weight_scale", lambda s: s[:-1]), f"{LAYER}.weight_scale"),
    "int8: zero points that config.json does not have": (INT8, add(f"{LAYER}.weight_zero_point", torch.zeros(3, dtype=torch.int8)), f"{LAYER}.weight_zero_point"),
    "packed: no scale": (INT4, drop(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale"),
    "packed: no shape": (INT4, drop(f"{LAYER}.weight_shape"), f"{LAYER}.weight_shape"),
    "packed: no words": (INT4, drop(f"{LAYER}.weight_packed"), f"{LAYER}.weight_packed"),
    "packed: no zero points": (INT4, drop(f"{LAYER}.weight_zero_point"), f"{LAYER}.weight_zero_point"),
    "packed: words cut": (INT4, put(f"{LAYER}.weight_packed", lambda w: w[:, 1:]), f"{LAYER}.weight_packed"),
    "packed: words of 64 bits": (INT4, put(f"{LAYER}.weight_packed", lambda w: w.long()), f"{LAYER}.weight_packed"),
    "packed: another shape": (INT4, put(f"{LAYER}.weight_shape", lambda s: s.flip(0)), LAYER),
    "packed: a huge shape": (INT4, put(f"{LAYER}.weight_shape", lambda s: s * 2**40), LAYER),
    "packed: a negative shape": (INT4, put(f"{LAYER}.weight_shape", lambda s: -s), f"{LAYER}.weight_shape"),
    "packed: a shape of one": (INT4, put(f"{LAYER}.weight_shape", scalar(1)), f"{LAYER}.weight_shape"),
    "packed: a shape of floats": (INT4, put(f"{LAYER}.weight_shape", lambda s: s.float()), f"{LAYER}.weight_shape"),
    "packed: groups cut": (INT4, put(f"{LAYER}.weight_scale", lambda s: s[:, 1:]), f"{LAYER}.weight_scale"),
    "packed: scales without groups": (INT4, put(f"{LAYER}.weight_scale", lambda s: s[:, 0]), f"{LAYER}.weight_scale"),
    "packed: NaN": (INT4, put(f"{LAYER}.weight_scale", first_is(float("nan"))), f"{LAYER}.weight_scale"),
    "packed: zero points cut": (INT4, put(f"{LAYER}.weight_zero_point", lambda z: z[1:]), f"{LAYER}.weight_zero_point"),
    "packed: dense, too": (INT4, add(WEIGHT, torch.zeros(96, 160)), LAYER),
    "packed: as GPTQ": (INT4, lambda t: t.update({f"{LAYER}.qweight": t.pop(f"{LAYER}.weight_packed")}), LAYER),
    "order: no list": (ORDER, lambda t: (drop(f"{LAYER}.weight_g_idx")(t), put(f"{LAYER}.weight_scale", lambda s: s[:, 1:])(t)), LAYER),
    "order: out of range": (ORDER, put(f"{LAYER}.weight_g_idx", first_is(5)), f"{LAYER}.weight_g_idx"),
    "order: cut": (ORDER, put(f"{LAYER}.weight_g_idx", lambda g: g[1:]), f"{LAYER}.weight_g_idx"),
    "gptq: no order": (GPTQ, drop(f"{LAYER}.g_idx"), f"{LAYER}.g_idx"),
    "gptq: out of range": (GPTQ, put(f"{LAYER}.g_idx", first_is(5)), f"{LAYER}.g_idx"),
    "gptq: negative": (GPTQ, put(f"{LAYER}.g_idx", first_is(-2)), f"{LAYER}.g_idx"),
    "gptq: floats for the order": (GPTQ, put(f"{LAYER}.g_idx", lambda g: g.float()), f"{LAYER}.g_idx"),
    "gptq: words cut": (GPTQ, put(f"{LAYER}.qweight", lambda w: w[1:]), LAYER),
    "gptq: no zero points": (GPTQ, drop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros"),
    "gptq: zero points cut": (GPTQ, put(f"{LAYER}.qzeros", lambda z: z[:, 1:]), f"{LAYER}.qzeros"),
    "gptq: scales cut": (GPTQ, put(f"{LAYER}.scales", lambda s: s[:, 1:]), f"{LAYER}.scales"),
    "gptq: infinite": (GPTQ, put(f"{LAYER}.scales", first_is(float("inf"))), f"{LAYER}.scales"),
    "gptq: no groups": (GPTQ, lambda t: (put(f"{LAYER}.scales", lambda s: s[:0])(t), put(f"{LAYER}.qzeros", lambda z: z[:0])(t)), f"{LAYER}.scales"),
    "awq: one dimension": (AWQ, put(f"{LAYER}.qweight", lambda w: w.flatten()), LAYER),
    "awq: words cut": (AWQ, put(f"{LAYER}.qweight", lambda w: w[:, 1:]), LAYER),
    "awq: zero points cut": (AWQ, put(f"{LAYER}.qzeros", lambda z: z[1:]), f"{LAYER}.qzeros"),
    "awq: zero": (AWQ, put(f"{LAYER}.scales", first_is(0.0)), f"{LAYER}.scales"),
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fp8 of another block": (FP8, {"weight_block_size": [64, 64]}, "weight_scale_inv"),
    "fp8 without its block": (FP8, {"weight_block_size": None}, "weight_scale_inv"),
    "a quantised layer is listed": (FP8, {"modules_to_not_convert": ["lm_head", "q_proj"]}, LAYER),
    "a list that names nothing": ("gptq dynamic", {"dynamic": {"+:.*up_proj": {"bits": 8, "group_size": 16}, "-:.*nothing": {}}}, "v_proj"),
    "groups that do not divide": (INT4, {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 48}}}}, "weight_scale"),
    "gptq of other groups": (GPTQ, {"group_size": 64}, "scales"),
    "gptq said to be awq": (GPTQ, {"quant_method": "awq", "version": "gemm"}, "_proj.scales"),
    "awq said to be gptq": (AWQ, {"quant_method": "gptq"}, "_proj.scales"),
    "awq of groups that do not divide": (AWQ, {"group_size": 48}, "scales"),
    "packed said to be fp8": (INT4, {"quant_method": "fp8"}, "weight_packed"),
    "fp8 said to be gptq": (FP8, {"quant_method": "gptq"}, "weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    names = {LEGACY, *(name for name, *_ in [*TENSORS.values(), *CONFIGS.values()])}
    return {name: mimo_packs(tmp_path_factory.mktemp("packs"), formats()[name]())[0] for name in names}


def error_of(folder: Path) -> str:
    start = time.process_time()
    with pytest.raises(ModelError) as caught:
        load_pair(folder, dtype="float64")
    assert time.process_time() - start < SECONDS
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_damaged_tensor_is_named(kind: str, folders: Mapping[str, Path], tmp_path: Path) -> None:
    name, change, told = TENSORS[kind]
    folder = edit(Path(shutil.copytree(folders[name], tmp_path / "pack")), change)
    message = error_of(folder)
    assert told in message
    assert "fetch" in message or "check that config.json" in message


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_does_not_fit_is_told_with_the_tensor(
    kind: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    name, changes, told = CONFIGS[kind]
    folder = Path(shutil.copytree(folders[name], tmp_path / "pack"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    message = error_of(folder)
    assert told in message
    assert inspect(folder).problem == message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json: modelopt, NVFP4"),
        ({"quantization": {"quant_algo": 8}}, "quant_algo"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}}, "exclude_modules"),
        ({"quantization": "FP8"}, "hf_quant_config.json cannot be read"),
        ([], "hf_quant_config.json holds a list"),
    ],
    ids=["nvfp4", "number", "string-for-a-list", "string", "list"],
)
def test_a_damaged_file_of_modelopt_is_named(
    content: object, told: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[LEGACY], tmp_path / "pack"))
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    assert told in error_of(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 20_000])
def test_a_cut_file_is_named(num_bytes: int, folders: Mapping[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[FP8], tmp_path / "pack"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert "model.safetensors" in error_of(folder)
