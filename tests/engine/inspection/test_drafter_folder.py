"""What an inspection finds of a drafter in a folder of its own is what a start would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.eagle import EagleOracle
from headway_testing.families import tiny_model
from headway_testing.inspection import edit, inspect

from headway.engine.build import assemble
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import HeadwayError


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    oracle = EagleOracle(tiny_model("LlamaForCausalLM"), dtype=torch.float32, owns_embedding=True)
    return oracle.save(tmp_path / "drafter", "speculators")


@pytest.mark.parametrize(
    "changes", [{}, {"depth": 0}, {"load_format": "dummy"}, {"dtype": "float64", "max_model_len": 100}], ids=str
)  # fmt: skip
def test_an_engine_reports_what_the_inspection_said(
    changes: dict[str, object], drafter: Path, tmp_path: Path
) -> None:
    """Of a model whose own MTP head is then not loaded."""
    folder = random_mimo(tmp_path / "model")
    options = {"drafter_path": str(drafter), **changes}
    found = inspect(folder, **options)
    engine = assemble(EngineConfig(model_path=str(folder), device="cpu", **options), progress=lambda _: None)  # type: ignore[arg-type]
    assert found.problem is None
    assert found.engine == engine.info
    assert engine.info.drafter == ("eagle3" if engine.info.depth else "none")
    assert not found.draft_head.is_loaded


def test_the_head_that_is_not_loaded_is_told_why(drafter: Path, tmp_path: Path) -> None:
    found = inspect(random_mimo(tmp_path / "model"), drafter_path=str(drafter)).draft_head
    assert (found.state, found.reason) == ("found", f"--drafter {drafter} needs none")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def of_another_model(folder: Path) -> None:
    target = tiny_model("LlamaForCausalLM", vocab_size=160)
    EagleOracle(target, vocab_size=160, dtype=torch.float32).save(folder, "original")


def without_lm_head(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))


def with_too_few_ids(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"d2t": tensors["d2t"][1:].clone()}))


def with_ids_of_no_token(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"d2t": tensors["d2t"] + 151}))


def with_architecture(value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        del content["speculators_model_type"]
        file.write_text(json.dumps(content | {"architectures": [value]}))

    return spoil


SPOILS = {
    "no-config": no_config,
    "other-model": of_another_model,
    "no-lm-head": without_lm_head,
    "few-ids": with_too_few_ids,
    "other-ids": with_ids_of_no_token,
    "list-as-architecture": with_architecture(["LlamaForCausalLMEagle3"]),
    "object-as-architecture": with_architecture({}),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_the_problem_is_the_error_of_a_start(
    spoil: Callable[[Path], None], drafter: Path, tmp_path: Path
) -> None:
    folder = random_mimo(tmp_path / "model")
    spoil(drafter)
    config = EngineConfig(model_path=str(folder), device="cpu", drafter_path=str(drafter))
    with pytest.raises(HeadwayError) as error:
        assemble(config, progress=lambda _: None)
    assert str(drafter) in str(error.value)
    assert inspect(folder, drafter_path=str(drafter)).problem == str(error.value)
