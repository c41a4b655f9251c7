"""rope_append does what rms_norm, rope and kv_append do one after the other."""

import pytest
import torch

from headway.kernels import HeadNorms, kv_append, rms_norm, rope, rope_append

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


@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "one-plus-weight"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (4, 2, 64, 32), (3, 1, 80, 20), (2, 3, 256, 64), (1, 1, 6, 2)],
)
def test_heads_are_normed_whole_and_turned_in_part(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_norms: bool,
    unit_offset: bool,
    device: torch.device,
) -> None:
    slots = SLOTS["mixed"]
    generator = torch.Generator().manual_seed(rotary_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fused = torch.randn(len(slots), q_heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    caches = torch.randn(2, BLOCKS, BLOCK_SIZE, kv_heads, head_dim, generator=generator).to(device, dtype)
    cos_sin = torch.randn(MAX_POSITION, rotary_dim, generator=generator).to(device)
    positions = torch.randint(0, MAX_POSITION, (len(slots),), generator=generator).to(device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    weights = torch.randn(2, head_dim, generator=generator).to(device, dtype)
    norms = HeadNorms(*weights, 1e-2, unit_offset) if has_norms else None

    separate, separate_caches = fused.clone(), caches.clone()
    heads = separate.split([q_heads, kv_heads, kv_heads], dim=1)
    if has_norms:
        for part, weight in zip(heads, weights, strict=False):
            rows = part.reshape(-1, head_dim)
            part.copy_(rms_norm(rows, weight, 1e-2, unit_offset=unit_offset).view(part.shape))
    turning = [part[..., :rotary_dim] for part in heads[:2]]
    rope(*turning, positions, cos_sin)
    kv_append(*heads[1:], *separate_caches, slot_mapping)

    query, key, value = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    rope_append(query, key, value, positions, cos_sin, *caches, slot_mapping, norms=norms)
    tolerance = 0.03 if device.type == "cuda" else 2e-6
    torch.testing.assert_close(fused, separate, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, separate_caches, rtol=tolerance, atol=tolerance)
