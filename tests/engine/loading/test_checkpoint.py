"""Loading a folder: values, dtypes, shards, and a clear error for everything that can be wrong with it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import (
    mimo_config,
    qwen2_config,
    random_mimo,
    random_qwen2,
    random_tensors,
    write_folder,
)
from headway_testing.oracle import Oracle
from headway_testing.paged import load, load_pair
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.loading import checkpoint
from headway.engine.loading.checkpoint import load_model
from headway.engine.loading.headers import parameter_counts
from headway.engine.models.registry import FAMILY_OF
from headway.engine.protocol.errors import ModelError
from headway.kernels import has_integer_products

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def by_name(models: ModelPair) -> dict[str, torch.Tensor]:
    """Their parameters under the checkpoint's names."""
    spec = models.target.spec
    names = FAMILY_OF[spec.architecture].names(spec)
    return {names.of(path): tensor for path, tensor in models.tensors().items()}


@pytest.mark.parametrize("num_shards", [1, 3], ids=["one-file", "shards"])
def test_every_parameter_gets_the_stored_values(num_shards: int, tmp_path: Path) -> None:
    config = mimo_config()
    tensors = random_tensors(config, with_draft_head=True)
    loaded = by_name(
        load_pair(write_folder(tmp_path, config, tensors, num_shards=num_shards), dtype="float64")
    )
    assert loaded.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(loaded[name], tensors[name].double())] == []


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"], ids=["one-file", "shards"])
def test_a_folder_that_transformers_wrote_is_read(max_shard_size: str, tmp_path: Path) -> None:
    oracle = Oracle(dtype=torch.float32)
    models = load_pair(oracle.save(tmp_path, with_head=False, max_shard_size=max_shard_size), dtype="float64")
    stored = oracle.model.state_dict()
    assert (tmp_path / INDEX).exists() == (max_shard_size == "20KB")
    assert [name for name, t in by_name(models).items() if not torch.equal(t, stored[name].double())] == []


def test_parts_of_a_fused_parameter_share_its_memory(tmp_path: Path) -> None:
    tensors = load(random_qwen2(tmp_path), dtype="float64").tensors()
    storages = {t.untyped_storage().data_ptr() for t in tensors.values()}
    # A layer of 12 tensors has 7 storages: q, k, v and their biases are two, gate and up are one.
    assert len(storages) == 3 + 3 * 7


@pytest.mark.parametrize(
    ("stored", "asked", "wanted"),
    [
        (torch.bfloat16, "auto", torch.float32),
        (torch.float32, "float64", torch.float64),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float64, "float16", torch.float16),
    ],
    ids=["auto-on-cpu", "widened", "to-bfloat16", "to-float16"],
)
def test_the_dtype_is_the_one_asked_for(
    stored: torch.dtype, asked: str, wanted: torch.dtype, tmp_path: Path
) -> None:
    config = qwen2_config()
    tensors = {n: t.to(stored) for n, t in random_tensors(config, with_draft_head=False).items()}
    model = load(write_folder(tmp_path, config, tensors), dtype=asked)
    assert model.dtype == wanted
    assert torch.equal(model.final_norm.weight, tensors[NORM].to(wanted))


def test_auto_is_the_dtype_of_most_tensors_off_the_cpu(tmp_path: Path) -> None:
    config = qwen2_config()
    tensors = {n: t.to(torch.bfloat16) for n, t in random_tensors(config, with_draft_head=False).items()}
    tensors[NORM] = tensors[NORM].float()
    folder = write_folder(tmp_path, config, tensors)
    model = load_model(
        folder, device=torch.device("meta"), dtype="auto", make_draft=None, progress=lambda _: None
    ).target
    assert model.dtype == torch.bfloat16


def test_progress_rises_to_one(tmp_path: Path) -> None:
    seen: list[float] = []
    load_model(
        random_mimo(tmp_path),
        device=torch.device("cpu"),
        dtype="auto",
        make_draft=MtpHead,
        progress=seen.append,
    )
    assert seen == sorted(seen)
    assert (seen[0] > 0, seen[-1], len(seen)) == (True, 1.0, 3 + 12 * 4 + 4)


def test_a_tied_head_is_counted_once_and_may_be_stored_twice(tmp_path: Path) -> None:
    config = qwen2_config(tie_word_embeddings=True)
    tensors = random_tensors(config, with_draft_head=False)
    stored_twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    models = load_pair(write_folder(tmp_path, config, stored_twice))
    num_parameters = sum(t.numel() for t in tensors.values())
    assert parameter_counts(models.outline()) == (num_parameters, 4 * num_parameters)


def test_a_head_that_differs_from_the_embedding_is_used_whatever_config_json_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = qwen2_config(tie_word_embeddings=True)
    tensors = random_tensors(config, with_draft_head=False)
    head = tensors["model.embed_tokens.weight"] + 1
    models = load_pair(write_folder(tmp_path, config, tensors | {"lm_head.weight": head}), dtype="float64")
    assert warnings_of(caplog, "tie_word_embeddings") == 1
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(models.tensors()["lm_head.weight"], theirs.lm_head.weight.double())
    assert parameter_counts(models.outline())[0] == sum(t.numel() for t in tensors.values()) + head.numel()


def warnings_of(caplog: pytest.LogCaptureFixture, word: str) -> int:
    return sum(
        record.name.startswith("headway.engine.loading.")
        and record.levelname == "WARNING"
        and word in record.getMessage()
        for record in caplog.records
    )


def test_a_tied_head_that_is_stored_alike_stays_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = qwen2_config(tie_word_embeddings=True)
    tensors = random_tensors(config, with_draft_head=False)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = load(write_folder(tmp_path, config, tensors), dtype="float64")
    assert "lm_head.weight" not in model.tensors()
    assert caplog.records == []


def test_a_head_of_another_shape_is_not_passed_over(tmp_path: Path) -> None:
    config = qwen2_config(tie_word_embeddings=True)
    tensors = random_tensors(config, with_draft_head=False) | {"lm_head.weight": torch.ones(150, 48)}
    with pytest.raises(ModelError, match=r"lm_head\.weight is \[150, 48\], not \[151, 48\]"):
        load(write_folder(tmp_path, config, tensors))


def test_a_head_that_is_announced_and_missing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = mimo_config()
    folder = write_folder(tmp_path, config, random_tensors(config, with_draft_head=False))
    assert load_pair(folder).draft is None
    assert warnings_of(caplog, "announces a draft head of 1 layers") == 1


def test_of_a_tensor_in_two_shards_the_later_file_counts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = qwen2_config()
    tensors = random_tensors(config, with_draft_head=False)
    folder = write_folder(tmp_path, config, tensors, num_shards=2)
    shards = sorted(folder.glob("*.safetensors"))
    for value, shard in enumerate(shards):
        save_file(load_file(shard) | {NORM: torch.full((48,), float(value))}, shard)
    model = load(folder)
    theirs = Qwen2ForCausalLM.from_pretrained(folder)
    assert torch.equal(model.final_norm.weight, theirs.model.norm.weight)
    assert warnings_of(caplog, NORM) == 1


def test_the_rotary_table_is_made_for_what_is_served(tmp_path: Path) -> None:
    """A trillion positions, of which 100 are served."""
    folder = random_qwen2(tmp_path, max_position_embeddings=10**12)
    model = load_model(
        folder,
        device=torch.device("cpu"),
        dtype="auto",
        make_draft=None,
        progress=lambda _: None,
        max_model_len=100,
    ).target
    assert model.rotary_bytes == 100 * 16 * 4
    with pytest.raises(ModelError, match=r"rotary table .* 1,000,000,000,000 positions .*--max-model-len"):
        load(folder)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    config = qwen2_config()
    tensors = random_tensors(config, with_draft_head=False)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert len(load(write_folder(tmp_path, config, tensors)).state()) == 3


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def folder_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def device_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def link_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "nowhere")


def link_in_a_circle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def index_of(content: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(json.dumps(content))

    return write


FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), ["neither model.safetensors nor", INDEX]),
    "only-pickle": (only_pickle, ["pytorch_model.bin", "convert"]),
    "folder-for-weights": (folder_for_weights, ["model.safetensors is a folder", "regular file"]),
    "device-for-weights": (device_for_weights, ["model.safetensors is a device"]),
    "link-to-nothing": (link_to_nothing, ["model.safetensors is a link to ", "does not exist"]),
    "link-in-a-circle": (link_in_a_circle, ["model.safetensors cannot be read", "symbolic links"]),
    "cut-off": (cut_off, ["model.safetensors is not a whole safetensors file"]),
    "index-no-map": (index_of([]), [INDEX, "weight_map"]),
    "index-outside": (index_of({"weight_map": {NORM: "../x.safetensors"}}), ["outside", "../x.safetensors"]),
    "shard-missing": (index_of({"weight_map": {NORM: "b.safetensors"}}), ["lacks b.safetensors", INDEX]),
    "tensor-missing": (lambda f: edit(f, lambda t: t.pop(NORM)), ["lacks 1 tensors", NORM]),
    "bias-missing": (
        lambda f: edit(f, lambda t: t.pop("model.mtp_layers.0.self_attn.k_proj.bias")),
        [
            "lacks 1 tensors",
            "model.mtp_layers.0.self_attn.k_proj.bias",
            "or serve without the draft head: --drafter",
        ],
    ),
    "many-missing": (
        lambda f: edit(f, lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n]),
        ["lacks 12 tensors", "model.layers.1.input_layernorm.weight", "and 4 more"],
    ),
    "tensor-unexpected": (
        lambda f: edit(f, lambda t: t.update({"model.layers.9.mlp.gate.weight": torch.ones(2)})),
        ["1 tensors", "does not have", "model.layers.9.mlp.gate.weight"],
    ),
    "wrong-shape": (
        lambda f: edit(f, lambda t: t.update({NORM: torch.ones(47)})),
        [NORM, "[47], not [48]"],
    ),
    "wrong-dtype": (
        lambda f: edit(f, lambda t: t.update({NORM: torch.ones(48, dtype=torch.int8)})),
        [NORM, "is I8", "BF16"],
    ),
}


@pytest.mark.parametrize(("spoil", "parts"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_folder_is_named(
    spoil: Callable[[Path], object], parts: list[str], tmp_path: Path
) -> None:
    spoil(random_mimo(tmp_path))
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert [part for part in (str(tmp_path), *parts) if part not in str(caught.value)] == []


def test_weights_without_the_right_to_read_are_no_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To root every file is open."""
    random_mimo(tmp_path)
    opened = Path.open

    def refuse(path: Path, *arguments: object) -> object:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ModelError, match=r"model\.safetensors cannot be read: Permission denied; give user \d+ the right"
    ):
        load(tmp_path)


def test_a_tensor_of_the_trunk_cannot_be_done_without(tmp_path: Path) -> None:
    edit(random_mimo(tmp_path), lambda t: [t.pop(n) for n in (NORM, "model.mtp_layers.0.input_proj.weight")])
    with pytest.raises(ModelError, match=r"lacks 2 tensors: .*; fetch the weights again$"):
        load(tmp_path)


def test_an_mtp_head_in_a_qwen2_folder_is_unexpected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, qwen2_config(), random_tensors(mimo_config(), with_draft_head=True))
    with pytest.raises(ModelError, match=r"model\.mtp_layers\.0\."):
        load(folder)


def test_a_model_too_large_for_memory_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_mimo(tmp_path)
    num_parameters, _ = parameter_counts(load_pair(folder).outline())
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: 4 * num_parameters - 1)
    with pytest.raises(ModelError) as caught:
        load(folder)
    parts = [f"{4 * num_parameters / 1024:.1f} KiB", f"{num_parameters:,} parameters of 4 bytes", "on cpu"]
    assert [part for part in (str(folder), *parts) if part not in str(caught.value)] == []
    assert load_pair(folder, dtype="bfloat16").draft is not None


needs_products = pytest.mark.skipif(
    not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler"
)


@needs_products
@pytest.mark.parametrize("is_tied", [False, True])
def test_few_bits_and_the_largest_layer_must_fit_and_no_more(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": is_tied}
    folder = random_mimo(tmp_path, **sizes)
    whole = load_pair(folder, cpu_weights="int4")
    _, dense = parameter_counts(whole.outline())
    layers = [layer for layer in whole.outline().linears() if not (is_tied and layer.is_lm_head)]
    few_bits = sum(linear.nbytes for linear in whole.linears())
    needed = dense - sum(layer.nbytes for layer in layers) + few_bits + max(layer.nbytes for layer in layers)
    assert needed < dense / 2
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: needed - 1)
    with pytest.raises(ModelError, match=r"are available on cpu"):
        load_pair(folder, cpu_weights="int4")
    enough = needed + whole.target.rotary_bytes
    monkeypatch.setattr(checkpoint, "available_bytes", lambda device: enough)
    load_pair(folder, cpu_weights="int4")


PEAK = """
import sys, torch
from headway.engine.loading.checkpoint import make_dummy_model
options = {"device": torch.device("cpu"), "dtype": "float32", "make_draft": None, "progress": lambda _: None}
make_dummy_model(sys.argv[1], cpu_weights=sys.argv[2], **options)
with open("/proc/self/status") as file:  # ru_maxrss begins with what the parent had
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


@needs_products
@pytest.mark.slow
def test_a_model_of_few_bits_is_never_dense_as_a_whole(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "head_dim": 64, "rms_norm_eps": 1e-6,
        "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
        "vocab_size": 2000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    full, few_bits = (
        1024 * int(subprocess.check_output([sys.executable, "-P", "-c", PEAK, str(tmp_path), kind]))
        for kind in ("full", "int4")
    )
    dense = 4 * 8 * (3 * 4096 + 3 * 1024) * 1024
    assert few_bits < full - dense / 2  # both with what the process itself takes
