"""rope against rotation of complex numbers in float64."""

import pytest
import torch

from headway.kernels import rope

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAX_POSITION = 97


def angles(head_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return torch.arange(MAX_POSITION).double()[:, None] * frequencies


def table(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    turn = angles(head_dim)
    return torch.cat((turn.cos(), turn.sin()), -1).to(device, dtype)


def turned(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    first, second = heads.double().cpu().chunk(2, -1)
    turn = angles(heads.shape[-1])[positions.cpu()][:, None]
    result = torch.complex(first, second) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((result.real, result.imag), -1)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 2), (7, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads_turn_by_their_position(
    head_dim: int, q_heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    query = torch.randn(5, q_heads, head_dim, generator=generator).to(device, dtype)
    key = torch.randn(5, kv_heads, head_dim, generator=generator).to(device, dtype)
    positions = torch.tensor([0, 1, 96, 1, 50], device=device)
    expected = turned(query, positions), turned(key, positions)
    cos_sin = table(head_dim, torch.float64 if dtype == torch.float64 else torch.float32, device)
    before = cos_sin.clone()
    rope(query, key, positions, cos_sin)
    for result, right in zip((query, key), expected, strict=True):
        torch.testing.assert_close(result.double().cpu(), right, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(cos_sin, before)


def test_parts_of_a_fused_projection_turn_in_place(device: torch.device) -> None:
    """Query and key as views of one tensor; the values beside them stay."""
    fused = torch.randn(6, 8 * 64, generator=torch.Generator().manual_seed(0)).to(device)
    query, key = fused[:, :256].view(6, 4, 64), fused[:, 256:384].view(6, 2, 64)
    positions, values = torch.arange(6, device=device), fused[:, 384:].clone()
    expected = turned(query, positions), turned(key, positions)
    rope(query, key, positions, table(64, torch.float32, device))
    for result, right in zip((query, key), expected, strict=True):
        torch.testing.assert_close(result.double().cpu(), right, rtol=0, atol=TOLERANCE[torch.float32])
    assert torch.equal(fused[:, 384:], values)


def test_a_token_does_not_depend_on_the_others(device: torch.device, is_interpreted: bool) -> None:
    most, fewer = (9, (1, 4)) if is_interpreted else (33, (1, 4, 16))
    fused = torch.randn(most, 6, 64, generator=torch.Generator().manual_seed(0)).to(device)
    positions, cos_sin = torch.arange(most, device=device), table(64, torch.float32, device)
    for tokens in fewer:
        together, alone = fused.clone(), fused[:tokens].clone()
        rope(together[:, :4], together[:, 4:], positions, cos_sin)
        rope(alone[:, :4], alone[:, 4:], positions[:tokens], cos_sin)
        assert torch.equal(alone, together[:tokens])


def test_no_tokens(device: torch.device) -> None:
    empty = torch.zeros(0, 4, 64, device=device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    rope(empty, empty.clone(), positions, table(64, torch.float32, device))
