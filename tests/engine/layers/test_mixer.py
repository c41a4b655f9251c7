"""A mixer of another kind takes part in a decoder without knowing how the residual stream is fused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.paged import PagedSequences, load
from headway_testing.running_sum import DECAY, RunningSum, with_running_sums
from torch.nn.functional import rms_norm, silu

from headway.engine.layers import attention, stream
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import RowTokens
from headway.engine.layers.placement import Placement
from headway.engine.models.spec import AttentionSpec, NormSpec

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def hybrid(path: Path) -> tuple[CausalLM, RunningSum]:
    """Returns a model of two layers, the first with a running sum, and that sum."""
    model = with_running_sums(load(random_mimo(path, **SIZES), dtype="float64"))
    mixer = model.layers[0].mixer
    assert isinstance(mixer, RunningSum)
    return model, mixer


def decayed(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum over j <= i of DECAY^(i - j) * value j, as one product."""
    steps = torch.arange(len(values), dtype=values.dtype)
    powers = torch.tril(DECAY ** (steps[:, None] - steps))
    return powers @ values


@pytest.mark.parametrize("is_fused", [False, True], ids=["single-launches", "fused"])
def test_a_running_sum_mixes_tokens(is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "defers_norm", lambda *_: is_fused)
    monkeypatch.setattr(attention, "fuses_qkv", lambda *_: is_fused)
    model, mixer = hybrid(tmp_path / "model")
    tokens = torch.randint(0, 151, (21,), generator=torch.Generator().manual_seed(0))
    sequences = PagedSequences(model, 2, 16)
    found = sequences.forward([(0, 0, 8), (1, 0, 13)], tokens)
    model.layers.pop()
    first = PagedSequences(model, 2, 16).forward([(0, 0, 8), (1, 0, 13)], tokens)

    layer = model.layers[0]
    expected = model.embedding[tokens]
    normed = rms_norm(expected, expected.shape[1:], layer.input_norm.weight, layer.input_norm.spec.epsilon)
    projected = normed @ mixer.input.weight.T
    sums = torch.cat([decayed(part) for part in projected.split([8, 13])])
    expected = expected + sums @ mixer.output.weight.T
    norm = layer.feed_forward_norm
    gate, up = (
        (rms_norm(expected, expected.shape[1:], norm.weight, norm.spec.epsilon) @ layer.feed_forward.input.weight.T)
        .chunk(2, dim=1)
    )  # fmt: skip
    expected = expected + (silu(gate) * up) @ layer.feed_forward.output.weight.T
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-5)
    assert not torch.equal(found, first), "the second layer is attention's"


def test_accepted_tokens_reach_every_mixer(tmp_path: Path) -> None:
    model, mixer = hybrid(tmp_path / "model")
    sequences = PagedSequences(model, 2, 16)
    inputs = sequences.inputs([(0, 0, 2), (1, 0, 2)], torch.tensor([1, 2, 3, 4]))
    model.commit(replace(inputs, rows=RowTokens(torch.arange(2), 2, 2)), torch.tensor([2, 1]), sequences.pool)
    assert mixer.committed == [[2, 1]]


def test_what_a_layer_adds_may_be_normed(tmp_path: Path) -> None:
    """The four norms of a layer of Gemma 3, one layer on one token, where attention gives the value back."""
    model = load(random_mimo(tmp_path / "model", **SIZES), dtype="float64")
    norms = NormSpec(1e-3), NormSpec(1e-2, unit_offset=True)
    spec = replace(
        model.spec,
        layers=(replace(model.spec.layers[0], post_mixer_norm=norms[0], post_feed_forward_norm=norms[1]),),
    )
    model = CausalLM(spec, Placement(torch.device("cpu"), torch.float64))
    for seed, tensor in enumerate(model.tensors().values()):
        tensor.normal_(generator=torch.Generator().manual_seed(seed))
    own = {path.removeprefix("layers.0."): tensor for path, tensor in model.tensors().items()}

    def normed(x: torch.Tensor, path: str, norm: NormSpec = spec.norm) -> torch.Tensor:
        weight = own[path] + 1 if norm.unit_offset else own[path]
        return rms_norm(x, x.shape[1:], weight, norm.epsilon)

    found = PagedSequences(model, 1, 1).forward([(0, 0, 1)], torch.tensor([7]))
    expected = own["embedding"][[7]]
    value = normed(expected, "input_norm") @ own["attention.value.weight"].T + own["attention.value.bias"]
    kind = spec.layers[0].mixer
    assert isinstance(kind, AttentionSpec)
    heads = value.view(1, kind.num_kv_heads, -1).repeat_interleave(kind.num_heads // kind.num_kv_heads, 1)
    expected = expected + normed(
        heads.flatten(1) @ own["attention.output.weight"].T, "post_mixer_norm", norms[0]
    )
    inner = normed(expected, "feed_forward_norm")
    gate, up = (inner @ own[f"feed_forward.{part}.weight"].T for part in ("gate", "up"))
    down = (silu(gate) * up) @ own["feed_forward.down.weight"].T
    expected = expected + normed(down, "post_feed_forward_norm", norms[1])
    torch.testing.assert_close(found, expected)
