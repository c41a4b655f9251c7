"""sigmoid_mul against float64 arithmetic."""

import pytest
import torch

from headway.kernels import sigmoid_mul

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(0, 2, 16), (1, 1, 16), (5, 3, 24), (2, 8, 256)])
def test_each_result_is_multiplied_by_its_gate(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(tokens, heads, dim, generator=generator).to(device, dtype)
    pairs = (torch.randn(tokens, heads, 2, dim, generator=generator) * 4).to(device, dtype)
    gate = pairs.unbind(2)[1]
    wanted = x.double() * gate.double().sigmoid()
    sigmoid_mul(x, gate)
    torch.testing.assert_close(x.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 37, 3, 24, generator=generator).to(device)
    together = x.clone()
    sigmoid_mul(together, gate)
    for tokens in (1, 2, 7):
        some = x[:tokens].clone()
        sigmoid_mul(some, gate[:tokens])
        assert torch.equal(some, together[:tokens])
