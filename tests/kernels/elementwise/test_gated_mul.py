"""gated_mul against float64 arithmetic."""

import pytest
import torch
from headway_testing.products import ACTIVATIONS

from headway.kernels import GateActivation, gated_mul

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("intermediate", [1, 63, 704, 3000])
def test_the_gate_acts_on_the_other_half(
    tokens: int, intermediate: int, dtype: torch.dtype, activation: GateActivation, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(intermediate)
    gate_up = (torch.randn(tokens, 2 * intermediate, generator=generator) * 4).to(device, dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    result = gated_mul(gate_up, activation)
    assert result.dtype == dtype
    expected = ACTIVATIONS[activation](gate) * up
    # PyTorch's gelu of a negative gate is a difference of numbers as large as the gate.
    error = (result.double() - expected).abs() / (1 + (gate * up).abs())
    assert bool((error <= TOLERANCE[dtype]).all())
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("large", [200.0, 1e30])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
def test_large_gates_neither_overflow_nor_turn_to_nan(
    large: float, activation: GateActivation, device: torch.device
) -> None:
    gate_up = torch.tensor([[-large, large, 0.0, 3.0, 3.0, 3.0]], device=device)
    assert gated_mul(gate_up, activation).tolist() == [[0.0, (gate_up[0, 1] * 3).item(), 0.0]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_token_does_not_depend_on_the_others(
    activation: GateActivation, device: torch.device, is_interpreted: bool
) -> None:
    most, fewer = (9, (1, 4)) if is_interpreted else (260, (1, 4, 33, 255, 256))
    gate_up = torch.randn(most, 1408, generator=torch.Generator().manual_seed(0)).to(device)
    together = gated_mul(gate_up, activation)
    for tokens in fewer:
        assert torch.equal(gated_mul(gate_up[:tokens].contiguous(), activation), together[:tokens])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("share", [8, 16, 24, 48])
def test_a_share_of_the_columns_has_the_bits_of_the_whole(
    share: int, dtype: torch.dtype, activation: GateActivation, device: torch.device
) -> None:
    gate, up = torch.randn(2, 3, 240, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    whole = gated_mul(torch.cat([gate, up], 1), activation)
    for first in range(0, 240, share):
        part = slice(first, first + share)
        found = gated_mul(torch.cat([gate[:, part], up[:, part]], 1), activation)
        assert torch.equal(found, whole[:, part]), first
