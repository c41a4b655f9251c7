"""Parameters are allocated where they are wanted, and a fused layer shows its parts by their paths."""

from __future__ import annotations

import pytest
import torch

from headway.engine.layers.attention import Attention
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.models.spec import AttentionSpec, RopeSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_a_fused_layer_shows_views_by_path(has_bias: bool) -> None:
    layer = Placement(CPU, torch.float64).linear({"gate": 3, "up": 5}, 7, has_bias=has_bias)
    tensors = layer.tensors()
    kinds = ("weight", "bias") if has_bias else ("weight",)
    assert [*tensors] == [f"{path}.{kind}" for kind in kinds for path in ("gate", "up")]
    for tensor in tensors.values():
        tensor.fill_(1.0)
    assert (layer.shape, layer.num_weights, layer.nbytes) == ((8, 7), 56, 448)
    assert torch.equal(
        layer(torch.ones(1, 7, dtype=torch.float64)), torch.full((1, 8), 7.0 + has_bias).double()
    )


@pytest.mark.parametrize("kv_dtype", [None, torch.float16], ids=["as-parameters", "float16"])
def test_the_cache_may_have_a_dtype_of_its_own(kv_dtype: torch.dtype | None) -> None:
    spec = AttentionSpec(4, 2, 16, RopeSpec(1e4, 16), 0.25)
    place = Placement(CPU, torch.float32, kv_dtype)
    attention = Attention(spec, 32, place, RotaryTables(8, place))
    assert {kept.dtype for kept in attention.state(1)} == {kv_dtype or torch.float32}
    assert {tensor.dtype for tensor in attention.tensors().values()} == {torch.float32}
