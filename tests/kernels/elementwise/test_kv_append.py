"""kv_append writes the slots it is given and no other cell."""

import pytest
import torch

from headway.kernels import kv_append

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def check(slots: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    shape = len(slots), 2, kv_heads, head_dim
    fused = torch.randint(-99, 99, shape, generator=generator).to(device, dtype)
    caches = torch.full((2, 6, 4, kv_heads, head_dim), 101, device=device).to(dtype)
    expected = caches.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[:, slot // 4, slot % 4] = fused[token]
    kv_append(fused[:, 0], fused[:, 1], caches[0], caches[1], torch.tensor(slots, device=device).long())
    assert torch.equal(caches, expected)


@pytest.mark.parametrize(
    "slots",
    [[], [-1], [0], [23], [3, 4], [9, -1, 0, -1, 22], [-1, -1, -1], list(range(23, -1, -1))],
    ids=["none", "padding only", "first", "last", "block boundary", "mixed", "all padding", "all"],
)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 1), (2, 64), (3, 80)])
def test_only_the_named_slots_change(
    slots: list[int], kv_heads: int, head_dim: int, device: torch.device
) -> None:
    check(slots, kv_heads, head_dim, torch.float32, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_written_bit_by_bit(dtype: torch.dtype, device: torch.device) -> None:
    check([5, -1, 17, 2], 2, 16, dtype, device)
