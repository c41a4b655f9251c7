"""The layer of a mixture of experts, against sums over all experts, and a token alone against the same among
others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from headway.engine.layers import experts
from headway.engine.layers.experts import Experts, compile_experts
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.placement import Placement
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.work import RoutedExperts
from headway.engine.models.spec import ExpertsSpec, NormSpec
from headway.engine.protocol.config import CpuWeights
from headway.kernels import ExpertMatrix, ExpertWeights, has_integer_products

HIDDEN, INNER, EXPERTS = 48, 24, 7
SPECS = {
    "plain": ExpertsSpec(EXPERTS, 3, INNER),
    "shared": ExpertsSpec(EXPERTS, 3, INNER, has_shared_expert=True),
    "not normalised": ExpertsSpec(EXPERTS, 2, INNER, normalises=False),
    "all": ExpertsSpec(EXPERTS, EXPERTS, INNER, has_shared_expert=True),
    "gelu": ExpertsSpec(EXPERTS, 1, INNER, activation="gelu_tanh"),
}


def layer_of(spec: ExpertsSpec, dtype: torch.dtype) -> Experts:
    layer = Experts(spec, HIDDEN, Placement(torch.device("cpu"), dtype))
    generator = torch.Generator().manual_seed(0)
    for tensor in layer.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 1.5 / tensor.shape[-1] ** 0.5)
    return layer


def added(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """[n, hidden] -> [n, hidden]: what the layer adds to a stream of x."""
    stream = ResidualStream(x.clone())
    norm = RMSNorm(torch.ones(HIDDEN, dtype=x.dtype), NormSpec(1e-6))
    layer(stream, norm)
    return stream.sum() - x


def wanted(spec: ExpertsSpec, layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """Every expert of every token, times its score or zero."""
    tensors = {path.removeprefix("feed_forward."): tensor for path, tensor in layer.tensors().items()}
    activation: Callable[[torch.Tensor], torch.Tensor] = (
        F.silu if spec.activation == "silu" else lambda y: F.gelu(y, approximate="tanh")
    )
    x = F.rms_norm(x, (HIDDEN,), eps=1e-6)
    scores = (x @ tensors["router.weight"].T).softmax(1)
    least = scores.sort(1, descending=True).values[:, spec.top_k - 1 : spec.top_k]
    scores = torch.where(scores >= least, scores, 0.0)
    if spec.normalises:
        scores = scores / scores.sum(1, keepdim=True)
    gate, up = torch.einsum("ehk,nk->neh", tensors["experts.gate_up"], x).chunk(2, 2)
    results = torch.einsum("ekh,neh->nek", tensors["experts.down"], activation(gate) * up)
    total = (results * scores[:, :, None]).sum(1)
    if not spec.has_shared_expert:
        return total
    gate, up = x @ tensors["shared.gate.weight"].T, x @ tensors["shared.up.weight"].T
    shared = (activation(gate) * up) @ tensors["shared.down.weight"].T
    return total + (x @ tensors["shared_gate.weight"].T).sigmoid() * shared


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_token_gets_the_sum_of_its_experts(spec: ExpertsSpec) -> None:
    layer = layer_of(spec, torch.float64)
    x = torch.randn(33, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(added(layer, x), wanted(spec, layer, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tokens_result_is_bitwise_the_same_among_any_others(spec: ExpertsSpec, dtype: torch.dtype) -> None:
    layer = layer_of(spec, dtype)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([added(layer, row) for row in x.split(1)])
    for count in (2, 3, 7, 16, 17, 63, 64):
        assert torch.equal(added(layer, x[:count]), alone[:count]), count
    assert torch.equal(added(layer, x.flip(0)).flip(0), alone)


@pytest.mark.skipif(not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler")
@pytest.mark.parametrize(("kind", "most_off"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_experts_of_few_bits_compute_nearly_the_same_and_alone_what_they_do_among_others(
    spec: ExpertsSpec, kind: CpuWeights, most_off: float
) -> None:
    layer = layer_of(spec, torch.float32)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1))
    exact, nbytes, saved = added(layer, x), layer.nbytes, layer.saved_bytes(kind)
    layer.finish(kind)
    assert nbytes - layer.nbytes == saved > 0
    assert all("router" in path or "shared_gate" in path for path in layer.tensors())
    found = added(layer, x)
    assert 0 < float((found - exact).norm() / exact.norm()) < most_off
    for count in (1, 2, 3, 7, 16, 17):
        assert torch.equal(added(layer, x[:count]), found[:count]), count
    assert torch.equal(added(layer, x.flip(0)).flip(0), found)


def test_the_work_counts_the_experts_of_a_token() -> None:
    layer = layer_of(SPECS["shared"], torch.float32)
    work, expert = layer.work(), 3 * HIDDEN * INNER
    assert work.active_weights == (EXPERTS + 1) * HIDDEN + 4 * expert
    assert work.active_bytes == 4 * work.active_weights
    assert work.routed == (RoutedExperts(EXPERTS, 3, 4 * expert),)
    assert work.further_expert_bytes(1) == pytest.approx(0)
    assert work.further_expert_bytes(1000) == pytest.approx((EXPERTS - 3) * 4 * expert)


def test_the_kernels_of_every_format_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a checkpoint can differ: of some the codes stay, others are expanded."""

    def with_codes(bits: int) -> Experts:
        layer = layer_of(SPECS["plain"], torch.float32)
        (gate_up, _), (down, _) = (matrix[:2] for matrix in layer.weights)
        layer.store(ExpertWeights(ExpertMatrix(gate_up, bits=bits), ExpertMatrix(down, bits=bits)))
        return layer

    seen: list[tuple[int, int]] = []

    def of_each_kernel(x: torch.Tensor, weights: ExpertWeights, num_slots: int, most: int) -> list[int]:
        seen.append((weights.gate_up.bits, most))
        return []

    monkeypatch.setattr(experts, "tokens_of_each_kernel", of_each_kernel)
    compile_experts([with_codes(bits) for bits in (16, 16, 8, 4, 8)], 100)
    assert seen == [(16, 100), (8, 100), (4, 100)]
