"""rms_norm, add_rms_norm and embed_rms_norm against float64 arithmetic and the rounding order of the
models."""

import math

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from headway.kernels import add_rms_norm, embed_rms_norm, rms_norm, sum_experts

EPSILON = 1e-5
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WIDTHS = pytest.mark.parametrize("hidden", [1, 7, 64, 200, 256, 1500])
OFFSETS = pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "1+weight"])


def tensors(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + hidden)
    shapes = (tokens, hidden), (tokens, hidden), (hidden,)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def exact(x: torch.Tensor, weight: torch.Tensor, unit_offset: bool) -> torch.Tensor:
    wide = x.double()
    factor = weight.double() + unit_offset
    return wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt() * factor


@WIDTHS
@OFFSETS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norm(hidden: int, unit_offset: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, _, weight = tensors(5, hidden, dtype, device)
    result = rms_norm(x, weight, EPSILON, unit_offset=unit_offset)
    assert result.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), exact(x, weight, unit_offset), rtol=tolerance, atol=tolerance)


@WIDTHS
@OFFSETS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norm_after_a_residual_addition(
    hidden: int, unit_offset: bool, dtype: torch.dtype, device: torch.device, is_interpreted: bool
) -> None:
    x, residual, weight = tensors(3, hidden, dtype, device)
    total = x + residual
    before = x.clone()
    result = add_rms_norm(x, residual, weight, EPSILON, unit_offset=unit_offset)
    # The interpreter truncates to bfloat16 where a GPU rounds.
    tolerance = TOLERANCE[dtype] if is_interpreted and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(residual, total, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before)
    assert torch.equal(result, rms_norm(residual, weight, EPSILON, unit_offset=unit_offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_rounds_as_the_models_do(dtype: torch.dtype, device: torch.device, is_interpreted: bool) -> None:
    """Bit for bit on the CPU twin; elsewhere the order of the sum may differ in the last place."""
    x, _, weight = tensors(16, 256, dtype, device)
    oracle = Qwen2RMSNorm(256, EPSILON).to(device, dtype)
    oracle.weight.data.copy_(weight)
    result, expected = rms_norm(x, weight, EPSILON), oracle(x).detach()
    if device.type == "cpu" and not is_interpreted:
        assert torch.equal(result, expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_a_row_does_not_depend_on_the_others(device: torch.device, is_interpreted: bool) -> None:
    most, fewer = (9, (1, 4)) if is_interpreted else (64, (1, 4, 16, 33))
    x, _, weight = tensors(most, 256, torch.float32, device)
    together = rms_norm(x, weight, EPSILON)
    for rows in fewer:
        assert torch.equal(rms_norm(x[:rows].contiguous(), weight, EPSILON), together[:rows])


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    """What a split of a fused projection gives: rows apart, columns together."""
    x, _, weight = tensors(4, 64, torch.float32, device)
    wide = torch.full((4, 100), 7.0, device=device)
    wide[:, 10:74] = x
    assert torch.equal(rms_norm(wide[:, 10:74], weight, EPSILON), rms_norm(x, weight, EPSILON))


@WIDTHS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norm_of_embedded_tokens(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    embedding, _, weight = tensors(9, hidden, dtype, device)
    ids = torch.tensor([3, 0, 8, 3], device=device)
    embedded, normed = embed_rms_norm(ids, embedding, weight, EPSILON)
    assert torch.equal(embedded, embedding[ids])
    assert torch.equal(normed, rms_norm(embedding[ids], weight, EPSILON))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_embedded_tokens_are_scaled_as_gemma_scales_them(
    dtype: torch.dtype, device: torch.device, is_interpreted: bool
) -> None:
    """sqrt(3072) is 55.5 in bfloat16."""
    embedding, _, weight = tensors(9, 200, dtype, device)
    theirs = Gemma3TextScaledWordEmbedding(9, 200, 0, embed_scale=3072**0.5).to(device, dtype)
    theirs.weight.data.copy_(embedding)
    ids = torch.tensor([3, 0, 8, 3], device=device)
    embedded, normed = embed_rms_norm(ids, embedding, weight, EPSILON, scale=3072**0.5, unit_offset=True)
    # The interpreter truncates to bfloat16 where a GPU rounds; transformers has the scale in float32 at most.
    tolerance = 1e-7 if dtype == torch.float64 else TOLERANCE[dtype] if is_interpreted else 0
    torch.testing.assert_close(embedded, theirs(ids).detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(normed, rms_norm(embedded, weight, EPSILON, unit_offset=True))


def test_norms_side_by_side(device: torch.device) -> None:
    x, embedding, weight = tensors(4, 64, torch.float32, device)
    ids = torch.tensor([2, 2, 0, 1], device=device)
    both = torch.full((4, 130), 7.0, device=device)
    assert rms_norm(x, weight, EPSILON, out=both[:, :64]).data_ptr() == both.data_ptr()
    embed_rms_norm(ids, embedding, weight, EPSILON, out=both[:, 64:128])
    expected = torch.cat([rms_norm(part, weight, EPSILON) for part in (x, embedding[ids])], 1)
    assert torch.equal(both[:, :128], expected)
    assert bool((both[:, 128:] == 7).all())


def test_no_tokens(device: torch.device) -> None:
    x, residual, weight = tensors(0, 64, torch.float32, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert [part.shape for part in embed_rms_norm(none, weight[None], weight, EPSILON)] == [(0, 64)] * 2
    assert rms_norm(x, weight, EPSILON).shape == (0, 64)
    assert add_rms_norm(x, residual, weight, EPSILON).shape == (0, 64)


@pytest.mark.parametrize("kind", ["alone", "added", "embedded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_8_bits(kind: str, dtype: torch.dtype, device: torch.device, is_interpreted: bool) -> None:
    """The norm as it would be, then rounded once to 4 significant bits of its quotient by the step."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no float8")
    x, residual, weight = tensors(9, 200, dtype, device)
    ids = torch.tensor([3, 0, 8, 3, 1], device=device)
    step = torch.tensor(
        [2.0 ** math.ceil(math.log2(200**0.5 * float(weight.abs().max()) / 448))], device=device
    )
    backing = torch.zeros(9, 300, device=device).to(torch.float8_e4m3fn)
    if kind == "alone":
        plain = rms_norm(x, weight, EPSILON)
        result = rms_norm(x, weight, EPSILON, step=step, out=backing[:, 40:240])
        assert bool((backing[:, :40].float() == 0).all())
        assert bool((backing[:, 240:].float() == 0).all())
    elif kind == "added":
        plain = add_rms_norm(x, residual.clone(), weight, EPSILON)
        result = add_rms_norm(x, residual, weight, EPSILON, step=step)
    else:
        _, plain = embed_rms_norm(ids, x, weight, EPSILON)
        embedded, result = embed_rms_norm(ids, x, weight, EPSILON, step=step)
        assert torch.equal(embedded, x[ids])
    assert result.dtype == torch.float8_e4m3fn
    quotients = plain.float() / step
    if not is_interpreted:
        assert torch.equal(result.float(), quotients.to(torch.float8_e4m3fn).float())
    # Triton's interpreter rounds up to half of the next power of two.
    is_near = (result.float() - quotients).abs() <= quotients.abs() / 16 + 2**-10
    assert is_near.float().mean() > (0.9 if is_interpreted else 0.999)


def test_a_step_wants_memory_of_8_bits(device: torch.device) -> None:
    x, _, weight = tensors(2, 64, torch.float32, device)
    with pytest.raises(AssertionError, match=r"float32 is given for .*float8"):
        rms_norm(x, weight, EPSILON, step=torch.ones(1, device=device), out=torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [1, 9])
def test_shares_are_summed_as_by_themselves(slots: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(slots)
    results = torch.randn(5 * slots, 300, generator=generator).to(device, dtype)
    shares = torch.rand(5, slots, generator=generator).to(device)
    residual, weight = (
        torch.randn(*size, generator=generator).to(device, dtype) for size in ((5, 300), (300,))
    )
    plain, shared = residual.clone(), residual.clone()
    expected = add_rms_norm(sum_experts(results, shares), plain, weight, 1e-6)
    found = add_rms_norm(results, shared, weight, 1e-6, shares=shares)
    # In float32 the sum is not rounded before it is added: the last product may be fused with the addition.
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(shared, plain, rtol=tolerance, atol=tolerance)
