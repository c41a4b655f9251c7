"""rope_append does what rope and kv_append do one after the other."""

import pytest
import torch

from headway.kernels import kv_append, rope, rope_append

MAX_POSITION, BLOCK_SIZE, BLOCKS = 50, 4, 6
SLOTS = {
    "none": [],
    "one": [23],
    "padding only": [-1, -1],
    "block boundary": [3, 4],
    "mixed": [9, -1, 0, 22, -1],
    "all": list(range(23, -1, -1)),
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 64), (7, 1, 80), (2, 3, 128)]
)
def test_queries_and_keys_turn_and_the_named_slots_change(
    slots: list[int], q_heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fused = torch.randn(len(slots), q_heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    caches = torch.randn(2, BLOCKS, BLOCK_SIZE, kv_heads, head_dim, generator=generator).to(device, dtype)
    cos_sin = torch.randn(MAX_POSITION, head_dim, generator=generator).to(device)
    positions = torch.randint(0, MAX_POSITION, (len(slots),), generator=generator).to(device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)

    separate, separate_caches = fused.clone(), caches.clone()
    query, key, value = separate.split([q_heads, kv_heads, kv_heads], dim=1)
    rope(query, key, positions, cos_sin)
    kv_append(key, value, *separate_caches, slot_mapping)

    query, key, value = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    rope_append(query, key, value, positions, cos_sin, *caches, slot_mapping)
    assert torch.equal(fused, separate)
    assert torch.equal(caches, separate_caches)


def test_float64_heads_keep_their_precision(device: torch.device) -> None:
    fused = torch.randn(3, 6, 32, dtype=torch.float64).to(device)
    caches = torch.zeros(2, BLOCKS, BLOCK_SIZE, 1, 32, dtype=torch.float64, device=device)
    cos_sin = torch.randn(MAX_POSITION, 32, dtype=torch.float64).to(device)
    positions, slots = torch.tensor([4, 0, 49], device=device), torch.tensor([1, 2, 3], device=device)
    twin = fused.clone()
    query, key, value = fused.split([4, 1, 1], dim=1)
    rope_append(query, key, value, positions, cos_sin, *caches, slots)
    rope(twin[:, :4], twin[:, 4:5], positions, cos_sin)
    torch.testing.assert_close(fused[:, :4], twin[:, :4], rtol=0, atol=1e-13)
    torch.testing.assert_close(caches[0].flatten(0, 1)[slots], twin[:, 4:5], rtol=0, atol=1e-13)
