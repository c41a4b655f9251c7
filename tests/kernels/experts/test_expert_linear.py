"""expert_linear against products of each token with each of its experts, and against itself among other
tokens."""

from __future__ import annotations

import pytest
import torch
from headway_testing.products import ACTIVATIONS

from headway.kernels import (
    ExpertChoice,
    ExpertMatrix,
    ExpertWeights,
    GateActivation,
    expanded_expert,
    expert_linear,
    expert_results,
    pack_expert,
    tokens_of_each_kernel,
)
from headway.kernels.experts import api as expert_api
from headway.kernels.experts._pair_blocks import arrange_pairs, sizes_of_blocks
from headway.kernels.reference.experts.expert_linear import expert_linear as expert_linear_twin

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
    bits = 8 if kind == "float8" else 4
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    if bits == 8:
        codes[(codes & 127) == 127] -= 1
    scales = (torch.rand(experts, outputs, inputs // 128, generator=generator) * 0.01 + 1e-4).bfloat16()
    zeros = torch.randint(0, 16, scales.shape, generator=generator) if kind == "int4 with zeros" else None
    parts = []
    for expert in range(experts):
        part = pack_expert(codes[expert], scales[expert], None if zeros is None else zeros[expert], bits=bits)
        assert part is not None, "kernels read such codes"
        parts.append(part)
    values, factors = (torch.stack(some).to(device) for some in zip(*parts, strict=True))
    return ExpertMatrix(values, factors, bits)


def chosen(tokens: int, slots: int, experts: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Returns ids, of which a token has none twice; the second token is padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    ids[1:2] = -1
    return ids.to(device)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_value_is_a_code_less_its_zero_point_times_its_scale(bits: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (64, 384), dtype=torch.uint8, generator=generator)
    codes[codes % 128 == 127] = 0
    scales = (torch.rand(64, groups, generator=generator) + 1e-3).bfloat16()
    zeros = torch.randint(0, 16, (64, groups), generator=generator) if bits == 4 else None
    packed = pack_expert(codes, scales, zeros, bits=bits)
    assert packed is not None
    values, factors = packed
    assert values.nbytes == codes.numel() * bits // 8
    whole = codes.view(torch.float8_e4m3fn).float() if bits == 8 else codes.float()
    if zeros is not None:
        whole = whole - zeros.repeat_interleave(384 // groups, 1)
    expected = (whole * scales.float().repeat_interleave(384 // groups, 1)).bfloat16()
    assert torch.equal(expanded_expert(ExpertMatrix(values[None], factors[None], bits), 0), expected)


def test_what_no_kernel_reads_is_not_packed() -> None:
    codes = torch.randint(0, 120, (64, 256), dtype=torch.uint8)
    ones = torch.ones(64, 2)
    assert pack_expert(codes, ones, bits=8) is not None
    assert pack_expert(codes, ones * 1.001, bits=8) is None, "a scale that bfloat16 does not have"
    assert pack_expert(codes, ones * 256, bits=8) is None, "a scale beyond 128"
    assert pack_expert(codes, torch.ones(64, 4), bits=8) is None, "groups of 64"
    assert pack_expert(codes[:, :200], ones, bits=8) is None, "200 inputs"
    codes[3, 5] = 127
    assert pack_expert(codes, ones, bits=8) is None, "NaN"


@pytest.mark.parametrize("gate", [None, *ACTIVATIONS])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_each_pair_is_a_product_with_its_expert(
    tokens: int, kind: str, gate: GateActivation | None, device: torch.device, is_interpreted: bool
) -> None:
    if is_interpreted and kind != "dense":
        pytest.skip("the interpreter has no inline assembly")
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
    if is_interpreted and kind != "dense":
        pytest.skip("the interpreter has no inline assembly")
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


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_triton_computes_any_number_of_tokens(
    tokens: int, device: torch.device, is_interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to eight tokens are not sorted; the loop over experts of a CPU would copy their ids to the host."""
    if device.type == "cpu" and not is_interpreted:
        pytest.skip("Triton computes nothing")
    monkeypatch.delattr(expert_api, "cpu_experts")
    experts, hidden, inner, slots = 6, 64, 96, 3
    weights = ExpertWeights(
        matrix_of("dense", experts, 2 * inner, hidden, torch.float32, device),
        matrix_of("dense", experts, hidden, inner, torch.float32, device),
    )
    ids = chosen(tokens, slots, experts, device)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(device)
    found = expert_results(x, ExpertChoice(ids, torch.ones(ids.shape, device=device)), weights)
    inners = expert_linear_twin(x, weights.gate_up, ids, gate="silu")
    expected = expert_linear_twin(inners, weights.down, ids)
    is_pair = ids.flatten() >= 0
    torch.testing.assert_close(found[is_pair], expected[is_pair], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [9, 40, 1500])
def test_blocks_have_every_pair_once_and_one_expert_each(
    tokens: int, device: torch.device, is_interpreted: bool
) -> None:
    if device.type == "cpu" and not is_interpreted:
        pytest.skip("only kernels sort pairs")
    experts, slots = 50, 6
    ids = chosen(tokens, slots, experts, device)
    blocks = arrange_pairs(ids, experts)
    assert blocks is not None
    most = sizes_of_blocks(tokens, slots, experts).rows
    flat, order, seen = ids.flatten().tolist(), blocks.order.tolist(), []
    for expert, start, end in zip(*(part.tolist() for part in blocks[1:4]), strict=True):
        if expert >= 0:
            assert 0 < end - start <= most
            assert {flat[pair] for pair in order[start:end]} == {expert}
            seen += order[start:end]
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if expert >= 0]


@pytest.mark.parametrize(("experts", "slots"), [(8, 1), (8, 2), (3, 3), (257, 9), (513, 11)])
def test_every_number_of_tokens_has_its_kernel_compiled(
    experts: int, slots: int, device: torch.device, is_interpreted: bool
) -> None:
    """256 experts and a shared one: 456 to 485 tokens have blocks of 16 pairs, sorted 8192 at a time."""
    if device.type == "cpu" and not is_interpreted:
        pytest.skip("numbers of tokens choose kernels alone")
    shape = torch.empty(experts, 64, 32, device=device)
    weights = ExpertWeights(ExpertMatrix(shape), ExpertMatrix(shape.mT))
    found = tokens_of_each_kernel(torch.zeros(1, 32, device=device), weights, slots, 1000)

    def sorting(tokens: int) -> tuple[int, int]:
        sizes = sizes_of_blocks(tokens, slots, experts)
        return sizes.rows, sizes.chunk

    assert max(found) <= 1000
    assert set(map(sorting, found)) == {sorting(tokens) for tokens in range(1, 1001)}
