"""Which checkpoints exist for prefix hits, and what becomes of them."""

from __future__ import annotations

from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.checkpoints import Checkpoints

A, B, C = b"a", b"b", b"c"


def keep(checkpoints: Checkpoints, request_id: int, key: bytes) -> int | None:
    """Takes a checkpoint after 16 tokens and publishes its block."""
    checkpoint = checkpoints.take(request_id, 16)
    if checkpoint is not None:
        checkpoints.keep(request_id, 16, key)
    return checkpoint


def test_the_one_used_longest_ago_makes_room() -> None:
    checkpoints = Checkpoints(2)
    first, second = keep(checkpoints, 1, A), keep(checkpoints, 2, B)
    assert {first, second} == {0, 1}
    assert checkpoints.use(A) == first
    assert keep(checkpoints, 3, C) == second
    assert (checkpoints.has(A), checkpoints.has(B), checkpoints.has(C)) == (True, False, True)


def test_pending_ones_are_not_taken() -> None:
    checkpoints = Checkpoints(1)
    assert checkpoints.take(1, 16) == 0
    assert checkpoints.take(2, 16) is None
    checkpoints.drop_pending(1)
    assert checkpoints.take(2, 16) == 0
    assert Checkpoints(0).take(1, 16) is None


def test_a_block_has_one_at_most() -> None:
    checkpoints = Checkpoints(2)
    first = keep(checkpoints, 1, A)
    keep(checkpoints, 2, A)
    assert (checkpoints.num_kept, checkpoints.use(A)) == (1, first)
    assert checkpoints.take(3, 16) is not None, "the other one is free again"


def test_evicted_and_unpublished_blocks_lose_theirs() -> None:
    checkpoints = Checkpoints(3)
    blocks = BlockAllocator(2, on_unpublish=checkpoints.drop)
    block_ids = blocks.allocate(2)
    assert block_ids is not None
    for request_id, (block_id, key) in enumerate(zip(block_ids, (A, B), strict=True)):
        blocks.publish(block_id, key)
        keep(checkpoints, request_id, key)
    blocks.unpublish(block_ids[:1])
    assert (checkpoints.has(A), checkpoints.has(B)) == (False, True)
    blocks.free(block_ids)
    assert checkpoints.has(B), "the block is unused, but still published"
    blocks.allocate(2)
    assert checkpoints.num_kept == 0
