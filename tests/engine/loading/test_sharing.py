"""Each rank reads its own rows: of every layout of experts, of delta nets, and of heads that ranks have in
common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headway_testing.hybrid import one_by_one, packed, rewrite
from headway_testing.ranks import run_ranks, shareable_folder

from headway.engine.layers.group import ALONE, Group
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.files import spans_within
from headway.engine.loading.sharing import spans_of
from headway.engine.models.registry import read_model_spec
from headway.engine.parallel.group import ProcessGroup
from headway.engine.protocol.config import FULL, Quantize
from headway.engine.speculation.select import announced_head

Tensors = dict[str, torch.Tensor]
SIZE = 4


def parameters(folder: Path, group: Group, *, is_dummy: bool = False, quantize: Quantize = FULL) -> Tensors:
    models = (make_dummy_model if is_dummy else load_model)(
        folder, device=torch.device("cpu"), dtype="float64", make_draft=announced_head(read_model_spec(folder)),
        progress=lambda _: None, group=group, quantize=quantize,
    )  # fmt: skip
    return models.tensors()


def parts_of(path: str, whole: torch.Tensor) -> list[torch.Tensor]:
    """Returns the share of each rank."""
    if path.endswith("experts.gate_up"):
        gate, up = (half.chunk(SIZE, 1) for half in whole.chunk(2, 1))
        return [torch.cat(pair, 1) for pair in zip(gate, up, strict=True)]
    if path.endswith("experts.down"):
        return list(whole.chunk(SIZE, 1))
    if path.endswith(("delta.qkv.weight", "delta.convolution")):  # 4 heads of 16 keys, 8 of 12 values
        parts = [part.chunk(SIZE) for part in whole.split_with_sizes([64, 64, 96])]
        return [torch.cat(own) for own in zip(*parts, strict=True)]
    if ".attention.key." in path or ".attention.value." in path:  # 2 heads
        first, second = whole.chunk(2)
        return [first, first, second, second]
    is_whole = "norm" in path or path == "embedding" or "router" in path or "shared_gate" in path
    return [whole] * SIZE if is_whole else list(whole.chunk(SIZE))


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("Qwen3_5MoeForCausalLM", packed),
        ("Qwen3_5MoeForCausalLM", one_by_one),
        ("Qwen3NextForCausalLM", packed),
    ],
    ids=["packed", "one-by-one", "regrouped"],
)
def test_ranks_have_their_shares_of_all_parameters(
    architecture: str, layout: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    folder = rewrite(shareable_folder(tmp_path, architecture), layout)
    whole = parameters(folder, ALONE)
    shares = {path: parts_of(path, tensor) for path, tensor in whole.items()}
    for rank, own in enumerate(run_ranks(SIZE, lambda group: parameters(folder, group))):
        assert own.keys() == whole.keys()
        assert [path for path, tensor in own.items() if not torch.equal(tensor, shares[path][rank])] == []


@pytest.mark.parametrize("quantize", [FULL, Quantize("fp8")], ids=["plain", "fp8"])
def test_ranks_draw_their_shares_of_all_parameters(quantize: Quantize, tmp_path: Path) -> None:
    folder = shareable_folder(tmp_path, "Qwen3_5MoeForCausalLM")
    (folder / "model.safetensors").unlink()
    whole = parameters(folder, ALONE, is_dummy=True, quantize=quantize)
    shares = {path: parts_of(path, tensor) for path, tensor in whole.items()}
    ranks = run_ranks(SIZE, lambda group: parameters(folder, group, is_dummy=True, quantize=quantize))
    for rank, own in enumerate(ranks):
        assert [path for path, tensor in own.items() if not torch.equal(tensor, shares[path][rank])] == []


def test_ranks_in_turn_have_the_shares_of_fewer_heads() -> None:
    spans = [spans_of((64, 32), 2, ProcessGroup(rank, 4)) for rank in range(4)]
    assert spans == [[(0, 32), (64, 16)]] * 2 + [[(32, 32), (80, 16)]] * 2


def test_rows_of_spans() -> None:
    spans = [(0, 4), (8, 4), (20, 1)]
    rows = [row for first, count in spans for row in range(first, first + count)]
    for start in range(len(rows)):
        for end in range(start, len(rows) + 1):
            found = spans_within(spans, start, end)
            assert [row for first, count in found for row in range(first, first + count)] == rows[start:end]
