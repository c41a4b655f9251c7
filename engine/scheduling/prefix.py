"""Finds the blocks that already hold the beginning of a request, by a chain of sha256 keys over blocks of
token ids.

A key stands for all tokens up to its block's end, so equal keys mean equal content; the chain's root is the
request's salt. Knows nothing of rows or rounds: the caller says which tokens are computed.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.checkpoints import Checkpoints
from headway.engine.scheduling.request import Request


@dataclass(slots=True)
class _Chain:
    """The keys of a request's first blocks, each hashed once, and the number of blocks that were offered
    already. borders: the positions at which a checkpoint of the row state is wanted."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    num_offered: int = 0
    borders: tuple[int, ...] = ()


class PrefixCache:
    """Mutable: the scheduler is its only writer. It reads requests and keeps one chain for each.

    checkpoints: those of a model with recurrent state, whose hits must end at a checkpoint. They are made at
    the two borders of a prompt where they are most useful: at the end of the blocks that it shares with
    others but found no checkpoint for, and at the last border that another prompt can hit (a chat's next
    turn). None: every published block can end a hit. prompt_grid: prompts and generated tokens are computed
    in different ways, so that only blocks of prompts are published, and found for prompts only; borders are
    multiples of prompt_grid. None: both are computed alike.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        is_enabled: bool,
        checkpoints: Checkpoints | None = None,
        prompt_grid: int | None = None,
    ) -> None:
        self._allocator = allocator
        self._checkpoints = checkpoints if is_enabled else None
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._has_grid = prompt_grid is not None
        self._border_blocks = max((prompt_grid or 1) // block_size, 1)  # both are powers of two
        self._chains: dict[int, _Chain] = {}

    def match(self, request: Request) -> list[int]:
        """Returns the published blocks that hold the request's first tokens; they are not shared yet.

        At most floor((N - 1) / block size) blocks of N tokens: the last token is always computed, and
        since nothing is ever written below it, a shared block is never rewritten.
        """
        if not self._is_enabled or request.is_audit:
            return []
        chain = self._chain(request)
        block_ids: list[int] = []
        for index in range(self._most_blocks(request)):
            block_id = self._allocator.find(self._key(chain, request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        if self._checkpoints is not None:
            self._end_at_checkpoint(request, chain, block_ids, self._checkpoints)
        chain.num_offered = len(block_ids)
        return block_ids

    def checkpoint(self, request: Request) -> int | None:
        """Returns the checkpoint at the end of the request's hit, from which its row starts; None: the row's
        state is zero."""
        if self._checkpoints is None or request.num_cached == 0:
            return None
        return self._checkpoints.use(self._chain(request).keys[request.num_cached // self._block_size - 1])

    def next_border(self, request: Request) -> int | None:
        """Returns the position at which the request's next chunk has to end at the latest, so that a
        checkpoint can be made there; None: it may end anywhere."""
        if self._checkpoints is None:
            return None
        borders = self._chain(request).borders
        return next((border for border in borders if border > request.num_computed), None)

    def take_checkpoint(self, request: Request) -> int | None:
        """Returns a checkpoint for the state after the computed tokens, if they end at a border; None: none
        is made."""
        if self._checkpoints is None:
            return None
        if request.num_computed not in self._chain(request).borders:
            return None
        return self._checkpoints.take(request.request_id, request.num_computed)

    def drop_pending(self, request: Request) -> None:
        """Frees the checkpoints of blocks that the request will not publish, because it ends or is
        preempted."""
        if self._checkpoints is not None:
            self._checkpoints.drop_pending(request.request_id)

    def drop_checkpoints(self, request: Request) -> None:
        """Frees the checkpoints at all borders of the request, because its state may be broken.

        The block that ends at such a border may be another request's, and stays published: a request whose
        hit was cut to a checkpoint recomputes blocks that exist already, and its checkpoint is then kept
        under their key.
        """
        chain = self._chains.get(request.request_id)
        if self._checkpoints is not None and chain is not None:
            for key in chain.keys:
                self._checkpoints.drop(key)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Lets others find the request's blocks that lie wholly within its first num_tokens tokens.

        The caller guarantees that they are complete and never written again. Each is offered once: if another
        block has the same content, this one is not found even after the other is evicted.
        """
        if not self._is_enabled or request.is_audit:
            return
        if self._has_grid:
            num_tokens = min(num_tokens, len(request.prompt_token_ids))
        chain = self._chain(request)
        for index in range(chain.num_offered, num_tokens // self._block_size):
            self._allocator.publish(request.block_ids[index], self._key(chain, request, index))
            chain.num_offered = index + 1
        if self._checkpoints is not None:
            self._keep_checkpoints(request, chain, num_tokens, self._checkpoints)

    def forget(self, request: Request) -> None:
        """Forgets the chain of a request that has ended. Its published blocks stay."""
        self._chains.pop(request.request_id, None)

    def _end_at_checkpoint(
        self, request: Request, chain: _Chain, block_ids: list[int], checkpoints: Checkpoints
    ) -> None:
        """Cuts the hit at its last checkpoint, and sets the borders at which the request makes
        checkpoints."""
        num_shared = len(block_ids)
        while block_ids and not checkpoints.has(chain.keys[len(block_ids) - 1]):
            block_ids.pop()
        step = self._border_blocks
        ends = {count // step * step for count in (num_shared, self._most_blocks(request))}
        wanted = sorted(count for count in ends if count > len(block_ids))
        chain.borders = tuple(count * self._block_size for count in wanted)

    def _most_blocks(self, request: Request) -> int:
        """Returns the most blocks that a hit of the request may have."""
        num_tokens = request.num_tokens - 1
        if self._has_grid:
            num_tokens = min(num_tokens, len(request.prompt_token_ids))
        return num_tokens // self._block_size

    def _keep_checkpoints(
        self, request: Request, chain: _Chain, num_tokens: int, checkpoints: Checkpoints
    ) -> None:
        for border in checkpoints.pending(request.request_id):
            if border <= num_tokens:
                key = self._key(chain, request, border // self._block_size - 1)
                assert self._allocator.find(key) is not None, (
                    f"the block that ends at {border} is not published"
                )
                checkpoints.keep(request.request_id, border, key)

    def _chain(self, request: Request) -> _Chain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = _Chain(hashlib.sha256(request.cache_salt.encode()).digest())
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
