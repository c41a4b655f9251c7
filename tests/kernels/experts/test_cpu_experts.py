"""Products of a CPU's experts, whose bits depend neither on other tokens nor on how outputs are shared."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.experts._cpu_experts import cpu_experts
from headway.kernels.reference.experts.expert_linear import expert_linear
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertMatrix

EXPERTS, SLOTS, TOKENS = 3, 2, 40


def case(outputs: int, inputs: int) -> tuple[torch.Tensor, ExpertMatrix, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, inputs, generator=generator)
    values = torch.randn(EXPERTS, outputs, inputs, generator=generator) / inputs**0.5
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:SLOTS] for _ in range(TOKENS)]).int()
    return x, ExpertMatrix(values), ids


@pytest.mark.parametrize("gate", [None, "silu"])
def test_the_products_are_the_twins(gate: GateActivation | None) -> None:
    x, weight, ids = case(96, 200)
    expected = expert_linear(x, weight, ids, gate=gate)
    torch.testing.assert_close(cpu_experts(x, weight, ids, gate=gate), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 200), (1024, 1100)])
def test_a_token_does_not_depend_on_the_others(num_tokens: int, outputs: int, inputs: int) -> None:
    x, weight, ids = case(outputs, inputs)
    together = cpu_experts(x, weight, ids)
    found = cpu_experts(x[:num_tokens], weight, ids[:num_tokens])
    assert torch.equal(found, together[: num_tokens * SLOTS])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (64, 2048), (1024, 2048)])
def test_shares_of_ranks_have_the_bits_of_the_whole(num_ranks: int, outputs: int, inputs: int) -> None:
    """MKL sums float32 in another order for few outputs."""
    x, weight, ids = case(outputs, inputs)
    whole = cpu_experts(x, weight, ids)
    shares = [ExpertMatrix(part.contiguous()) for part in weight.values.chunk(num_ranks, 1)]
    assert torch.equal(torch.cat([cpu_experts(x, share, ids) for share in shares], 1), whole)
