"""The MTP head of a checkpoint: found, missing, incomplete, or of an architecture that nobody here knows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import (
    mimo_config,
    random_mimo,
    random_qwen2,
    random_tensors,
    tensor_shapes,
    write_folder,
)
from headway_testing.inspection import edit, inspect, unknown, without_head
from safetensors.torch import load_file, save_file

HEAD_INPUT = "model.mtp_layers.0.input_proj.weight"


def moved_head(folder: Path) -> Path:
    """As fine-tuning tools leave it: the head in a file that no index names."""
    head = {n: t for n, t in load_file(folder / "model.safetensors").items() if "mtp" in n}
    save_file(head, folder / "mtp.safetensors")
    return without_head(folder)


def test_a_head_that_is_there_is_found_and_loaded(tmp_path: Path) -> None:
    head = inspect(random_mimo(tmp_path)).draft_head
    assert (head.state, head.num_layers, head.is_loaded, head.reason) == ("found", 1, True, None)
    assert (head.num_stored_tensors, head.prefixes, head.missing_tensors) == (
        16,
        ["model.mtp_layers.0."],
        [],
    )
    shapes = tensor_shapes(mimo_config(), with_draft_head=True)
    of_head = [torch.Size(shape).numel() for name, shape in shapes.items() if "mtp" in name]
    assert head.num_parameters == sum(of_head)


@pytest.mark.parametrize(
    ("changes", "reason"), [({"depth": 0}, "--depth 0"), ({"drafter": "ngram"}, "--drafter ngram")], ids=str
)
def test_a_head_that_nothing_asks_for_is_found_and_not_loaded(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    head = inspect(random_mimo(tmp_path), **changes).draft_head
    assert (head.state, head.is_loaded, head.reason) == ("found", False, f"{reason} needs none")


def test_a_head_without_tensors_is_missing_and_the_rest_is_served(tmp_path: Path) -> None:
    found = inspect(without_head(random_mimo(tmp_path)))
    assert (found.draft_head.state, found.draft_head.num_layers) == ("missing", 1)
    assert "no tensor's name begins with model.mtp_layers." in str(found.draft_head.reason)
    assert len(found.draft_head.missing_tensors) == 16
    assert found.problem is None
    assert found.engine is not None
    assert (found.engine.depth, found.engine.has_draft_head) == (0, False)
    assert any("no MTP head" in line for line in found.warnings)


def test_a_head_in_a_file_that_is_not_read_is_named(tmp_path: Path) -> None:
    head = inspect(moved_head(random_mimo(tmp_path))).draft_head
    assert head.state == "missing"
    assert str(head.reason).endswith("not read, because no index names them: mtp.safetensors")


def test_a_head_that_lacks_tensors_is_incomplete_and_they_are_named(tmp_path: Path) -> None:
    folder = edit(random_mimo(tmp_path), lambda t: t.pop(HEAD_INPUT))
    found = inspect(folder)
    assert (found.draft_head.state, found.draft_head.missing_tensors) == ("incomplete", [HEAD_INPUT])
    assert found.problem is not None
    assert HEAD_INPUT in found.problem
    assert "--drafter none" in found.problem
    assert found.engine is None
    assert inspect(folder, drafter="none").problem is None


def test_a_head_that_config_json_does_not_announce_is_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(mimo_config(), with_draft_head=True)
    found = inspect(write_folder(tmp_path, mimo_config(num_nextn_predict_layers=0), tensors))
    assert (found.draft_head.state, found.draft_head.num_stored_tensors) == ("none", 16)
    assert "16 tensors" in str(found.draft_head.reason)
    assert found.problem is None
    plain = inspect(random_qwen2(tmp_path / "plain")).draft_head
    assert (plain.state, plain.reason) == ("none", "Qwen2ForCausalLM has none")


@pytest.mark.parametrize(
    ("names", "config", "prefixes"),
    [
        (["mtp.fc.weight", "mtp.layers.0.norm.weight"], {}, ["mtp.", "mtp."]),
        (["model.mtp_layers.0.a", "model.mtp_layers.1.a"], {"num_nextn_predict_layers": 2}, ["model.mtp_layers.0.", "model.mtp_layers.1."]),
        (["model.layers.2.eh_proj.weight"], {"num_nextn_predict_layers": 1}, ["model.layers.2."]),
        (["mtp.norm.weight"], {"text_config": {"mtp_num_hidden_layers": 1, "num_hidden_layers": 2}}, ["mtp."]),
        ([], {"num_nextn_predict_layers": 1}, []),
        ([], {}, None),
    ],
    ids=["qwen", "mimo", "deepseek", "nested", "lost", "none"],
)  # fmt: skip
def test_of_an_unknown_architecture_what_can_be_told_is_told(
    names: list[str], config: dict[str, object], prefixes: list[str] | None, tmp_path: Path
) -> None:
    trunk = ["model.layers.0.a.weight", "model.layers.1.a.weight"]
    found = inspect(unknown(tmp_path, trunk + names, quantization_config={"quant_method": "fp8"}, **config))
    assert found.problem is not None
    assert "the architecture is BigMoeForCausalLM; supported are" in found.problem
    assert all(name in found.problem for name in found.supported_architectures)
    assert (found.architecture, found.family, found.shape, found.memory) == (
        "BigMoeForCausalLM",
        None,
        None,
        None,
    )
    assert found.quantization == "fp8"
    num_tensors = len(trunk + names)
    assert msgspec.structs.astuple(found.stored[0]) == (
        "F8_E4M3",
        num_tensors,
        6 * num_tensors,
        6 * num_tensors,
    )
    head = found.draft_head
    assert (head.state, head.num_stored_tensors) == ("none" if prefixes is None else "unknown", len(names))
    assert head.prefixes == sorted(set(prefixes or []))
