"""gated_mul against float64 arithmetic."""

import pytest
import torch

from headway.kernels import gated_mul

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("intermediate", [1, 63, 704, 3000])
def test_the_gate_acts_on_the_other_half(
    tokens: int, intermediate: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(intermediate)
    gate_up = (torch.randn(tokens, 2 * intermediate, generator=generator) * 4).to(device, dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    result = gated_mul(gate_up)
    assert result.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)
    assert torch.equal(gate_up, before)


def test_large_gates_neither_overflow_nor_turn_to_nan(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    assert gated_mul(gate_up).tolist() == [[0.0, 600.0, 0.0]]


def test_a_token_does_not_depend_on_the_others(device: torch.device, is_interpreted: bool) -> None:
    most, fewer = (9, (1, 4)) if is_interpreted else (260, (1, 4, 33, 255, 256))
    gate_up = torch.randn(most, 1408, generator=torch.Generator().manual_seed(0)).to(device)
    together = gated_mul(gate_up)
    for tokens in fewer:
        assert torch.equal(gated_mul(gate_up[:tokens].contiguous()), together[:tokens])
