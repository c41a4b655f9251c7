"""Which blocks already hold the beginning of a request: a chain of sha256 keys over blocks of token ids.

A key stands for all tokens up to its block's end, so equal keys mean equal content. The chain's root mixes
all else that the content depends on. Knows nothing of rows or rounds: the caller says what is filled.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.request import Request


@dataclass(slots=True)
class _Chain:
    """Keys of a request's first blocks, each hashed once, and how many blocks were offered already."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    num_offered: int = 0


class PrefixCache:
    """Mutable: the scheduler is its only writer. It reads requests and keeps one chain for each."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        model_identity: str,
        kv_dtype: str,
        is_enabled: bool,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._origin = (model_identity, kv_dtype, str(block_size))
        self._is_enabled = is_enabled
        self._chains: dict[int, _Chain] = {}

    def match(self, request: Request) -> list[int]:
        """The published blocks that hold the request's first tokens; they are not shared yet.

        At most floor((N - 1) / block size) blocks of N tokens: the last token is always computed, and
        since nothing is ever written below it, a shared block is never rewritten.
        """
        if not self._is_enabled:
            return []
        chain = self._chain(request)
        block_ids: list[int] = []
        for index in range((request.num_tokens - 1) // self._block_size):
            block_id = self._allocator.find(self._key(chain, request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        chain.num_offered = len(block_ids)
        return block_ids

    def publish(self, request: Request, num_tokens: int) -> None:
        """Lets others find the request's blocks that lie wholly within its first num_tokens tokens.

        The caller vouches that nothing in them is missing and that they are never written again. Each is
        offered once: where another block has the same content, it stays unfound when that one is evicted.
        """
        if not self._is_enabled:
            return
        chain = self._chain(request)
        for index in range(chain.num_offered, num_tokens // self._block_size):
            self._allocator.publish(request.block_ids[index], self._key(chain, request, index))
            chain.num_offered = index + 1

    def forget(self, request: Request) -> None:
        """The request has ended; what it published stays."""
        self._chains.pop(request.request_id, None)

    def _chain(self, request: Request) -> _Chain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = _Chain(_root(request.cache_salt, *self._origin))
            self._chains[request.request_id] = chain
        return chain

    def _key(self, chain: _Chain, request: Request, index: int) -> bytes:
        for i in range(len(chain.keys), index + 1):
            token_ids = request.token_ids(i * self._block_size, (i + 1) * self._block_size)
            assert len(token_ids) == self._block_size, (
                f"block {i} of request {request.request_id} is not full"
            )
            parent = chain.keys[-1] if chain.keys else chain.root
            chain.keys.append(hashlib.sha256(parent + array("q", token_ids).tobytes()).digest())
        return chain.keys[index]


def _root(*parts: str) -> bytes:
    """Each part is hashed by itself first, so that ("ab", "c") and ("a", "bc") differ."""
    return hashlib.sha256(b"".join(hashlib.sha256(part.encode()).digest() for part in parts)).digest()
