"""Products with quantised weights have the bits of products with the expanded weight, which is a code, less
its zero point, times its scale in float32, rounded once."""

from __future__ import annotations

import pytest
import torch
from headway_testing.products import ACTIVATIONS

from headway.kernels import (
    Activation,
    DenseWeight,
    Epilogue,
    GateActivation,
    QuantizedWeight,
    expanded_weight,
    library_is_ordered,
    linear,
    quantized_weight,
)
from headway.kernels.linear._hopper_quantized import quantized_constants_of
from headway.kernels.linear._ordered_linear import keep_sums_whole, ordered_linear
from headway.kernels.linear.dispatch import WeightFormat
from headway.kernels.types._code_tiles import pack_codes, paired_outputs, unpack_codes

CPU = torch.device("cpu")
# (bits, inputs of a scale or 0 for all of an output's, dtype of the scales, whether there are zero points)
KINDS = {
    "float8, blocks": (8, 128, torch.bfloat16, False),
    "float8, an output": (8, 0, torch.float32, False),
    "float8, groups of 256": (8, 256, torch.float32, False),
    "int4": (4, 128, torch.bfloat16, False),
    "int4, zeros": (4, 128, torch.bfloat16, True),
    "int4, an output, zeros": (4, 0, torch.float32, True),
    "int4, float32": (4, 128, torch.float32, False),
}
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 300)


def parts(
    kind: str, outputs: int, inputs: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Returns codes, scales, zeros and bits. Every code of float8 but NaN occurs."""
    bits, of_group, dtype, has_zeros = KINDS[kind]
    generator = torch.Generator(device).manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device, dtype=torch.uint8)

    codes = integers(256 if bits == 8 else 16, outputs, inputs)
    if bits == 8:
        codes[(codes & 127) == 127] -= 1
    groups = inputs // of_group if of_group else 1
    scales = torch.rand(outputs, groups, generator=generator, device=device) * 0.01 + 1e-6
    zeros = integers(16, outputs, groups) if has_zeros else None
    return codes, scales.to(dtype), zeros, bits


def weight_of(
    kind: str, outputs: int, inputs: int, device: torch.device, *, is_paired: bool = False
) -> QuantizedWeight:
    codes, scales, zeros, bits = parts(kind, outputs, inputs, device)
    found = quantized_weight(codes, scales, zeros, bits=bits, is_paired=is_paired)
    assert found is not None, "kernels compute such a weight"
    return found


def values_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Returns the values by the definition, in float64 where that is exact."""
    whole = codes.view(torch.float8_e4m3fn).double() if bits == 8 else codes.double() - 8
    by_input = codes.shape[1] // scales.shape[1]
    if bits == 4 and zeros is not None:
        whole = codes.double() - zeros.double().repeat_interleave(by_input, 1)
    return (whole * scales.double().repeat_interleave(by_input, 1)).float().bfloat16()


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_loses_nothing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (192, 256), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.numel() == codes.numel() * bits // 8
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_values_are_codes_times_scales_rounded_once(kind: str, is_paired: bool, device: torch.device) -> None:
    found = weight_of(kind, 192, 512, device, is_paired=is_paired)
    assert found.shape == (192, 512)
    assert torch.equal(expanded_weight(found), values_of(*parts(kind, 192, 512, device)))


def test_gates_lie_eight_outputs_from_what_they_multiply() -> None:
    order = paired_outputs(64, CPU).tolist()
    assert order[:20] == [*range(8), *range(32, 40), *range(8, 12)]
    assert sorted(order) == list(range(64))


def test_what_no_kernel_reads_is_not_packed() -> None:
    codes, scales, zeros, bits = parts("float8, blocks", 128, 512, CPU)
    assert quantized_weight(codes[:100], scales[:100], zeros, bits=bits) is None, "100 outputs"
    assert quantized_weight(codes[:, :384], scales[:, :3], zeros, bits=bits) is None, "384 inputs"
    assert quantized_weight(codes, scales.repeat_interleave(2, 1), zeros, bits=bits) is None, "groups of 64"
    assert quantized_weight(codes, scales * 1e6, zeros, bits=bits) is None, "scales beyond 128"
    codes[3, 5] = 255
    assert quantized_weight(codes, scales, zeros, bits=bits) is None, "NaN"


@pytest.mark.parametrize("rows", ROWS[:-2])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_fit_into_shared_memory(kind: str, rows: int) -> None:
    weight = weight_of(kind, 64, 512, CPU)
    sizes = quantized_constants_of(rows, weight, 227 * 1024)
    inputs, padded = sizes["INPUTS"], sizes["ROWS"]
    bytes_of_stage = 64 * inputs * weight.bits // 8 + 2 * padded * inputs
    assert sizes["STAGES"] * bytes_of_stage < (227 * 1024) // (2 if padded <= 32 else 1)
    assert sizes["STAGES"] >= 2, "copies run ahead of products"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (192, 11008), (6144, 2560), (64, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_the_expanded_weight(kind: str, shape: tuple[int, int]) -> None:
    """With a bias, a residual, in place, and of rows with gaps between them."""
    keep_sums_whole()
    device = torch.device("cuda")
    weight = weight_of(kind, *shape, device)
    dense = expanded_weight(weight)
    is_ordered = library_is_ordered(dense)
    weight = weight._replace(is_library_ordered=is_ordered)
    dense_format = WeightFormat.LIBRARY_ORDERED if is_ordered else WeightFormat.ORDERED
    torch.manual_seed(0)
    all_rows = torch.randn(max(ROWS), shape[1] + 64, device=device).bfloat16()[:, : shape[1]]
    bias, residual = (
        torch.randn(*size, device=device).bfloat16() for size in ((shape[0],), (max(ROWS), shape[0]))
    )
    for rows in ROWS:
        x = all_rows[:rows]
        for own_bias in (None, bias):
            plain = ordered_linear(x.contiguous(), dense, own_bias, weight_format=dense_format)
            assert torch.equal(linear(Activation(x), weight, Epilogue(own_bias)).values, plain), rows
        stream = residual[:rows].clone()
        linear(Activation(x), weight, Epilogue(bias, residual=stream), out=stream)
        assert torch.equal(stream, residual[:rows] + plain), rows
        beside = weight._replace(many=DenseWeight(dense, True, is_ordered))
        assert torch.equal(linear(Activation(x), beside, Epilogue(bias)).values, plain), rows


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_have_the_bits_of_the_expanded_weight(
    kind: str, has_bias: bool, activation: GateActivation
) -> None:
    keep_sums_whole()
    device = torch.device("cuda")
    weight = weight_of(kind, 2816, 1024, device, is_paired=True)
    dense = expanded_weight(weight)
    torch.manual_seed(0)
    x = torch.randn(max(ROWS), 1024, device=device).bfloat16()
    bias = torch.randn(2816, device=device).bfloat16() if has_bias else None
    for rows in ROWS:
        found = linear(Activation(x[:rows]), weight, Epilogue(bias, activation)).values
        assert torch.equal(found, ordered_linear(x[:rows], dense, bias, gate=activation)), rows
        beside = weight._replace(many=DenseWeight(dense, True))
        assert torch.equal(linear(Activation(x[:rows]), beside, Epilogue(bias, activation)).values, found), (
            rows
        )


@pytest.mark.parametrize("is_paired", [False, True])
def test_more_than_64_rows_multiply_by_the_copy(is_paired: bool) -> None:
    weight = weight_of("int4", 128, 256, CPU, is_paired=is_paired)
    gate: GateActivation | None = "silu" if is_paired else None
    other = DenseWeight(torch.zeros(128, 256, dtype=torch.bfloat16), True)
    torch.manual_seed(0)
    x = torch.randn(65, 256).bfloat16()
    for rows, is_copy in ((64, False), (65, True)):
        found = linear(Activation(x[:rows]), weight._replace(many=other), Epilogue(gate=gate)).values
        assert bool((found == 0).all()) == is_copy


@pytest.mark.gpu
def test_ten_thousand_products_in_graphs_are_the_same() -> None:
    """Copies, expansion and products run beside one another: none may read what another still writes."""
    device = torch.device("cuda")
    weights = [weight_of(kind, 4096, 4096, device) for kind in ("float8, blocks", "int4, zeros")]
    torch.manual_seed(0)
    x = torch.randn(48, 4096, device=device).bfloat16()
    expected = [[linear(Activation(x[:n]), weight).values for n in (1, 16, 48)] for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [[linear(Activation(x[:n]), weight).values for n in (1, 16, 48)] for weight in weights]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1700):
        graph.replay()
        for own, others in zip(found, expected, strict=True):
            wrong += sum((a != b).any() for a, b in zip(own, others, strict=True))
    assert wrong.item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_multiplies_the_values(kind: str) -> None:
    torch.manual_seed(0)
    x, bias, residual = (torch.randn(*size).bfloat16() for size in ((5, 512), (192,), (5, 192)))
    for own_bias in (None, bias):
        values = values_of(*parts(kind, 192, 512, CPU))
        product = torch.nn.functional.linear(x, values, own_bias)
        weight = weight_of(kind, 192, 512, CPU)
        assert torch.equal(linear(Activation(x), weight, Epilogue(own_bias)).values, product)
        stream = residual.clone()
        linear(Activation(x), weight, Epilogue(own_bias, residual=stream), out=stream)
        assert torch.equal(stream, residual + product)
        gated = linear(
            Activation(x), weight_of(kind, 192, 512, CPU, is_paired=True), Epilogue(own_bias, "silu")
        )
        gate, up = product.chunk(2, dim=1)
        assert torch.equal(
            gated.values, (torch.nn.functional.silu(gate.float()).bfloat16().float() * up.float()).bfloat16()
        )


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
@pytest.mark.parametrize("kind", ["float8, blocks", "int4, zeros"])
def test_further_outputs_are_multiplied_as_they_are(kind: str, device: torch.device) -> None:
    """As the gates of delta nets are, which follow quantised queries, keys and values."""
    rest = (torch.randn(96, 512, generator=torch.Generator().manual_seed(1)) * 0.05).to(
        device, torch.bfloat16
    )
    weight = weight_of(kind, 192, 512, device)._replace(rest=rest)
    dense = expanded_weight(weight)
    assert weight.shape == dense.shape == (288, 512)
    assert torch.equal(dense[192:], rest)
    if device.type == "cuda":
        keep_sums_whole()
    bias = torch.randn(288, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    for rows in ROWS:
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)
        if device.type == "cuda":
            expected = ordered_linear(x, dense, bias)
        else:
            expected = torch.nn.functional.linear(x, dense, bias)
        assert torch.equal(linear(Activation(x), weight, Epilogue(bias)).values, expected), rows
