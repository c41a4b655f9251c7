"""A mixer of another kind takes part in a decoder without knowing how the residual stream is fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.paged import PagedSequences, load
from torch.nn.functional import rms_norm, silu

from headway.engine.layers import attention, stream
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.state.specs import LayerState, StateSpec
from headway.kernels import Activation

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
NUM_CHANNELS = 192


class RunningSum:
    """The sum of a projection over the tokens up to each. A sequence is one segment from position 0 on: no state is kept."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(2, NUM_CHANNELS, hidden_size, dtype=dtype, generator=generator) / 16
        self.input, self.output = Linear(weights[0].contiguous()), Linear(weights[1].T.contiguous())
        self.committed: list[list[int]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def state(self) -> tuple[StateSpec, ...]:
        return ()

    def __call__(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        sums = self.input(x)
        for batch in inputs.batches:
            sums[batch.tokens] = sums[batch.tokens].cumsum(0)
        return sums

    def update_state(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> None:
        pass

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        self.committed.append(accepted.tolist())


def hybrid(path: Path) -> tuple[CausalLM, RunningSum]:
    """Returns a model of two layers, the first with a running sum, and that sum."""
    model = load(random_mimo(path, **SIZES), dtype="float64")
    mixer = RunningSum(model.spec.hidden_size, model.dtype)
    model.layers[0].mixer = mixer
    return model, mixer


@pytest.mark.parametrize("is_fused", [False, True], ids=["single-launches", "fused"])
def test_a_running_sum_mixes_tokens(is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "defers_norm", lambda *_: is_fused)
    monkeypatch.setattr(attention, "fuses_qkv", lambda *_: is_fused)
    model, mixer = hybrid(tmp_path / "model")
    tokens = torch.randint(0, 151, (21,), generator=torch.Generator().manual_seed(0))
    sequences = PagedSequences(model, 2, 16)
    found = sequences.forward([(0, 0, 8), (1, 0, 13)], tokens)
    model.layers.pop()
    first = sequences.forward([(0, 0, 8), (1, 0, 13)], tokens)

    layer = model.layers[0]
    expected = model.embedding[tokens]
    normed = rms_norm(expected, expected.shape[1:], layer.input_norm.weight, layer.input_norm.spec.epsilon)
    projected = normed @ mixer.input.weight.T
    sums = torch.cat([part.cumsum(0) for part in projected.split([8, 13])])
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
    model.commit(inputs, torch.tensor([2, 1]), sequences.pool)
    assert mixer.committed == [[2, 1]]
