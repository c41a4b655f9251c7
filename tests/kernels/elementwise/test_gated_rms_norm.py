"""gated_rms_norm against transformers' Qwen3_5RMSNormGated."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from headway.kernels import gated_rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(0, 2, 16), (1, 1, 12), (5, 3, 24), (3, 8, 128)])
def test_each_head_has_its_norm_and_gate(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(tokens, heads, dim, generator=generator).to(device, dtype)
    gate = torch.randn(tokens, heads * dim + 5, generator=generator).to(device, dtype)
    gate = gate[:, 5:].unflatten(1, (heads, dim))
    theirs = Qwen3_5RMSNormGated(dim, eps=1e-3).to(device, dtype)
    with torch.no_grad():
        theirs.weight.copy_(1 + 0.4 * torch.randn(dim, generator=generator))
        wanted = theirs(x, gate)
    result = gated_rms_norm(x, gate, theirs.weight.detach(), 1e-3)
    assert result.dtype == dtype
    assert result.is_contiguous()
    torch.testing.assert_close(result, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_float64_keeps_its_precision(device: torch.device) -> None:
    x, gate = torch.randn(2, 3, 2, 12, dtype=torch.float64, device=device)
    weight = torch.randn(12, dtype=torch.float64, device=device)
    wanted = torch.nn.functional.rms_norm(x, (12,), weight, 1e-6) * torch.nn.functional.silu(gate)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), wanted, rtol=0, atol=1e-13)


def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 37, 3, 24, generator=generator).to(device)
    weight = torch.randn(24, generator=generator).to(device)
    together = gated_rms_norm(x, gate, weight, 1e-6)
    for tokens in (1, 2, 7):
        some = gated_rms_norm(x[:tokens].clone(), gate[:tokens].clone(), weight, 1e-6)
        assert torch.equal(some, together[:tokens])
