"""Tracks the users of each block of the KV cache, and the unused blocks that still hold a known prefix.

Knows block ids, counts and opaque keys; nothing of tokens, requests or memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockAllocator:
    """Mutable: the scheduler and its prefix cache are the only writers.

    A block is in one of three states:

        free   count 0, no key   handed out first
        used   count > 0         with a key (others may share it) or without
        idle   count 0, a key    can be shared again; evicted when no block is free, longest idle first

    on_unpublish: called with each key that no block has any more.
    """

    def __init__(self, num_blocks: int, *, on_unpublish: Callable[[bytes], None] | None = None) -> None:
        self._on_unpublish = on_unpublish
        self._counts = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that `allocate` can hand out, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return len(self._counts) - self.num_free

    @property
    def num_cached(self) -> int:
        """Returns the number of idle blocks: unused ones that still hold a prefix."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` blocks that only the caller uses, or None if there are not enough."""
        return [self._take() for _ in range(count)] if count <= self.num_free else None

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds one user to each block, which must be published."""
        for block_id in block_ids:
            assert self.is_published(block_id), f"block {block_id} was never published, it cannot be shared"
            self._idle.pop(block_id, None)
            self._counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Removes one user from each block of a table, in the table's order.

        The last block is freed first, so that it is evicted first: a prefix outlives its continuations.
        """
        for block_id in reversed(block_ids):
            assert self._counts[block_id] > 0, f"block {block_id} is freed, but not in use"
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._put_back(block_id)

    def publish(self, block_id: int, key: bytes) -> None:
        """Makes a used block findable by its key, unless another block has that key already."""
        assert self._counts[block_id] > 0, f"block {block_id} is published, but not in use"
        assert self._keys.get(block_id, key) == key, f"block {block_id} is published under two keys"
        if self._blocks.setdefault(key, block_id) == block_id:
            self._keys[block_id] = key

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Makes these used blocks unfindable. Requests that share one keep it."""
        for block_id in block_ids:
            if block_id in self._keys:
                self._forget_key(block_id)

    def is_used(self, block_id: int) -> bool:
        return self._counts[block_id] > 0

    def is_published(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def _take(self) -> int:
        block_id = self._free.pop() if self._free else self._evict()
        self._counts[block_id] = 1
        return block_id

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        self._forget_key(block_id)
        return block_id

    def _forget_key(self, block_id: int) -> None:
        key = self._keys.pop(block_id)
        del self._blocks[key]
        if self._on_unpublish is not None:
            self._on_unpublish(key)

    def _put_back(self, block_id: int) -> None:
        if block_id in self._keys:
            self._idle[block_id] = None
        else:
            self._free.append(block_id)
