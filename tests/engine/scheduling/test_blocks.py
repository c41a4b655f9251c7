"""Blocks are counted, shared and evicted, and never handed out twice."""

from __future__ import annotations

import pytest

from headway.engine.scheduling.blocks import BlockAllocator


def allocate(blocks: BlockAllocator, count: int) -> list[int]:
    block_ids = blocks.allocate(count)
    assert block_ids is not None
    return block_ids


def publish(blocks: BlockAllocator, block_ids: list[int], name: str = "") -> list[bytes]:
    keys = [f"{name}{block_id}".encode() for block_id in block_ids]
    for block_id, key in zip(block_ids, keys, strict=True):
        blocks.publish(block_id, key)
    return keys


@pytest.mark.parametrize("count", [0, 1, 4], ids=str)
def test_blocks_are_handed_out_once(count: int) -> None:
    blocks = BlockAllocator(4)
    given = allocate(blocks, count) + allocate(blocks, 4 - count)
    assert sorted(given) == [0, 1, 2, 3]
    assert (blocks.num_used, blocks.num_free, blocks.allocate(1)) == (4, 0, None)


def test_an_allocation_is_all_or_nothing() -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(5) is None
    assert (blocks.num_free, blocks.num_used) == (4, 0)


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    blocks = BlockAllocator(2)
    given = allocate(blocks, 1)
    publish(blocks, given)
    blocks.share(given)
    blocks.free(given)
    assert (blocks.num_used, blocks.num_cached) == (1, 0)
    blocks.free(given)
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (0, 1, 2)


def test_a_published_block_can_be_shared_after_its_owner_left() -> None:
    blocks = BlockAllocator(2)
    given = allocate(blocks, 1)
    (key,) = publish(blocks, given)
    blocks.free(given)
    assert blocks.find(key) == given[0]
    blocks.share(given)
    assert (blocks.num_used, blocks.num_cached) == (1, 0)
    assert allocate(blocks, 1) != given
    assert blocks.allocate(1) is None


def test_free_blocks_are_taken_before_cached_ones() -> None:
    blocks = BlockAllocator(4)
    cached = allocate(blocks, 2)
    keys = publish(blocks, cached)
    blocks.free(cached)
    assert not set(allocate(blocks, 2)) & set(cached)
    assert [blocks.find(key) for key in keys] == cached


def test_eviction_takes_the_longest_idle_and_of_a_table_its_tail() -> None:
    blocks = BlockAllocator(6)
    old, new = allocate(blocks, 3), allocate(blocks, 3)
    keys = publish(blocks, old) + publish(blocks, new)
    blocks.free(old)
    blocks.free(new)
    order = [allocate(blocks, 1)[0] for _ in range(6)]
    assert order == [*reversed(old), *reversed(new)]
    assert [blocks.find(key) for key in keys] == [None] * 6


def test_sharing_makes_a_block_recent() -> None:
    blocks = BlockAllocator(2)
    first, second = allocate(blocks, 1), allocate(blocks, 1)
    for block in (first, second):
        publish(blocks, block)
        blocks.free(block)
    blocks.share(first)
    blocks.free(first)
    assert allocate(blocks, 2) == second + first


def test_an_evicted_block_is_no_longer_published() -> None:
    blocks = BlockAllocator(1)
    (key,) = publish(blocks, allocate(blocks, 1))
    blocks.free([0])
    allocate(blocks, 1)
    assert not blocks.is_published(0)
    blocks.free([0])
    assert (blocks.find(key), blocks.num_cached) == (None, 0)


def test_a_key_stays_with_the_block_that_had_it_first() -> None:
    blocks = BlockAllocator(2)
    first, second = allocate(blocks, 2)
    blocks.publish(first, b"key")
    blocks.publish(second, b"key")
    assert blocks.find(b"key") == first
    blocks.free([second])
    assert (blocks.num_cached, blocks.is_published(second)) == (0, False)


def test_freeing_twice_is_our_own_bug() -> None:
    blocks = BlockAllocator(2)
    given = allocate(blocks, 1)
    blocks.free(given)
    with pytest.raises(AssertionError, match="is freed, but not in use"):
        blocks.free(given)


def test_sharing_what_was_never_published_is_our_own_bug() -> None:
    blocks = BlockAllocator(2)
    with pytest.raises(AssertionError, match="never published"):
        blocks.share(allocate(blocks, 1))


def test_publishing_what_nobody_uses_or_under_two_keys_is_our_own_bug() -> None:
    blocks = BlockAllocator(2)
    with pytest.raises(AssertionError, match="is published, but not in use"):
        blocks.publish(0, b"key")
    (block_id,) = allocate(blocks, 1)
    blocks.publish(block_id, b"key")
    with pytest.raises(AssertionError, match="under two keys"):
        blocks.publish(block_id, b"other")
