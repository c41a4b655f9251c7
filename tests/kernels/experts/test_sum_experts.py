"""sum_experts against a sum that is rounded slot by slot."""

from __future__ import annotations

import pytest
import torch

from headway.kernels import sum_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "slots", "hidden"), [(0, 2, 8), (1, 1, 100), (5, 9, 2048), (3, 11, 1030)])
def test_results_are_added_slot_by_slot(
    tokens: int, slots: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(slots)
    results = torch.randn(tokens * slots, hidden, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, slots, generator=generator).to(device)
    expected = (results.double().view(tokens, slots, hidden) * weights.double()[..., None]).sum(1)
    found = sum_experts(results, weights)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_a_slot_comes_after_those_before_it(device: torch.device) -> None:
    results = torch.tensor([[1.0], [1e8], [-1e8]], device=device)
    assert sum_experts(results, torch.ones(1, 3, device=device)).item() == 0.0
    assert sum_experts(results.flip(0), torch.ones(1, 3, device=device)).item() == 1.0
