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
