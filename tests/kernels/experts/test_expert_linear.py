"""expert_linear against products of each token with each of its experts, and against itself among other
tokens."""

from __future__ import annotations

import pytest
import torch
from headway_testing.products import ACTIVATIONS

from headway.kernels import ExpertMatrix, GateActivation, expert_linear
from headway.kernels.reference.experts._expanded_expert import expanded_expert

FORMATS = ("dense", "float8", "int4", "int4 with zeros")


def matrix_of(
    kind: str,
    experts: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> ExpertMatrix:
    """Returns random weights; of codes the activations are bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    shape = experts, outputs, inputs
    if kind == "dense":
        return ExpertMatrix((torch.randn(shape, generator=generator) * inputs**-0.5).to(device, dtype))
    scales = torch.rand(experts, inputs // 128, outputs, generator=generator) * 0.01 + 1e-4
    if kind == "float8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        return ExpertMatrix(values.to(device), scales.to(device))
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, scales.shape, generator=generator).to(torch.bfloat16).to(device)
    scales = scales.to(device, torch.bfloat16)
    return ExpertMatrix(codes.to(device), scales, zeros if kind == "int4 with zeros" else None)


def chosen(tokens: int, slots: int, experts: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Returns ids, of which a token has none twice; the second token is padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    ids[1:2] = -1
    return ids.to(device)


def test_codes_of_inputs_64_apart_share_a_byte() -> None:
    codes = torch.arange(128, dtype=torch.uint8) % 16
    packed = codes[:64] | codes[64:].roll(1) << 4
    scales = torch.full((1, 1, 1), 0.5)
    expanded = expanded_expert(ExpertMatrix(packed.view(1, 1, 64), scales), 0)
    expected = (torch.cat([codes[:64], codes[64:].roll(1)]).float() - 8) * 0.5
    assert torch.equal(expanded[0].float(), expected)


@pytest.mark.parametrize("gate", [None, *ACTIVATIONS])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_each_pair_is_a_product_with_its_expert(
    tokens: int, kind: str, gate: GateActivation | None, device: torch.device, is_interpreted: bool
) -> None:
    experts, outputs, inputs, slots = 6, 96, 256, 3
    dtype = torch.float32 if is_interpreted else torch.bfloat16  # whose products it has not
    weight = matrix_of(kind, experts, outputs, inputs, dtype, device)
    ids = chosen(tokens, slots, experts, device)
    tolerance = 1e-5 if dtype == torch.float32 and kind == "dense" else 3e-2
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = expert_linear(x, weight, ids, gate=gate)
    assert found.shape == (tokens * slots, outputs if gate is None else outputs // 2)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            continue
        product = x[pair // slots].double() @ expanded_expert(weight, expert).double().T
        expected = product
        if gate is not None:
            first, second = product.chunk(2)
            expected = ACTIVATIONS[gate](first) * second
        torch.testing.assert_close(found[pair].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_pair_does_not_depend_on_the_others(kind: str, device: torch.device, is_interpreted: bool) -> None:
    """Few pairs, one by one, and many, sorted into blocks of one expert."""
    experts, outputs, inputs, slots = 5, 128, 384, 2
    dtype = torch.float32 if is_interpreted else torch.bfloat16
    weight = matrix_of(kind, experts, outputs, inputs, dtype, device)
    most, fewer = (20, (1, 9)) if is_interpreted else (300, (1, 2, 8, 9, 16, 40, 100, 299))
    ids = chosen(most, slots, experts, device)
    x = torch.randn(most, inputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    together = expert_linear(x, weight, ids)
    for tokens in fewer:
        found = expert_linear(x[:tokens].contiguous(), weight, ids[:tokens].contiguous())
        is_pair = ids[:tokens].flatten() >= 0
        expected = together[: tokens * slots][is_pair]
        # The interpreter multiplies by NumPy.
        tolerance = 1e-4 if is_interpreted else 0.0
        torch.testing.assert_close(found[is_pair], expected, rtol=tolerance, atol=tolerance)
