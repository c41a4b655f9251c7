"""causal_attention against softmax over the visible keys, of parts of one fused projection."""

import pytest
import torch

from headway.kernels import causal_attention, has_fused_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def projections(
    rows: int, window: int, heads: tuple[int, int], head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """query, key and value as a decoder layer has them: views of one tensor, nothing of which is contiguous."""
    generator = torch.Generator().manual_seed(rows * window + head_dim)
    fused = torch.randn(rows * window, heads[0] + 2 * heads[1], head_dim, generator=generator)
    parts = fused.to(device, dtype).split_with_sizes((heads[0], heads[1], heads[1]), dim=1)
    return tuple(part.unflatten(0, (rows, window)) for part in parts)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    sharing, window = query.shape[2] // key.shape[2], query.shape[1]
    q = query.double()
    k, v = (part.double().repeat_interleave(sharing, 2) for part in (key, value))
    is_hidden = torch.ones(window, window, dtype=torch.bool, device=query.device).triu(1)
    scores = torch.einsum("rwhd,rthd->rhwt", q, k) * scale
    return torch.einsum("rhwt,rthd->rwhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v)


def check(
    rows: int, window: int, heads: tuple[int, int], head_dim: int, where: tuple[torch.device, torch.dtype]
) -> None:
    parts = projections(rows, window, heads, head_dim, *where)
    result = causal_attention(*parts, 0.7 * head_dim**-0.5)
    assert result.is_contiguous()
    torch.testing.assert_close(
        result.double(), expected(*parts, 0.7 * head_dim**-0.5), rtol=0, atol=TOLERANCE[where[1]]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("rows", "window"), [(1, 1), (1, 33), (3, 20)])
def test_softmax_over_the_keys_of_the_window(
    rows: int, window: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check(rows, window, heads, 16, (device, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("rows", "window"), [(1, 2048), (3, 1024), (2, 1000)])
def test_types_and_head_sizes(rows: int, window: int, head_dim: int, dtype: torch.dtype) -> None:
    check(rows, window, (8, 2), head_dim, (torch.device("cuda"), dtype))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [("cpu", torch.bfloat16, 128), ("cuda", torch.float32, 128), ("cuda", torch.bfloat16, 256)],
)
def test_the_library_takes_16_bits_and_heads_up_to_128_on_a_gpu(
    device: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ask = has_fused_attention.__wrapped__  # the answer is kept for the process
    assert ask(torch.device("cuda"), torch.bfloat16, 128)
    assert not ask(torch.device(device), dtype, head_dim)
