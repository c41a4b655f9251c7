"""Supplies requests with blocks: shared prefixes, blocks for the next round, and spare blocks that save later
grants.

A round may be in flight when blocks are granted, so that the length of a row is only bounded from above.
"""

from __future__ import annotations

from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.scheduler_state import SchedulerState

# A row is granted blocks for this many tokens beyond its next round while blocks are plentiful. An H200
# starts each kernel of a round 0.3 us later if a kernel was launched by itself just before, as a grant is.
SPARE_TOKENS = 128


class BlockSupply:
    """Mutable: writes the blocks of requests in the scheduler's state. num_blocks: the size of the whole
    cache."""

    def __init__(self, state: SchedulerState, num_blocks: int) -> None:
        self._state = state
        self._num_blocks = num_blocks

    def grow_rows(self) -> list[tuple[Request, int]]:
        """Grants blocks for the next round of each row that lacks some, in the order of `running`.

        Returns (request, index of its first new block). A request that was granted blocks may still be
        preempted for a later one with a better claim.
        """
        first_new_blocks: list[tuple[Request, int]] = []
        for request in list(self._state.running):
            if self._state.can_decode(request):
                self._state.contain(self._grow_row, request, first_new_blocks)
        return first_new_blocks

    def take_for_admission(self, request: Request) -> bool:
        """Allocates blocks for all tokens of the request, a first round and perhaps spares. Blocks in the
        prefix cache are shared. Returns False if there are not enough.

        A scored prompt is computed from its first token on.
        """
        state = self._state
        hits = [] if request.scores_prompt else state.prefixes.match(request)
        state.blocks.share(hits)  # before new blocks are taken, which may evict
        request.block_ids = hits
        missing = self._num_needed(request, request.num_tokens) - len(hits)
        own = self._allocate(missing + self._num_spare(request, missing))
        if own is None:
            state.free_blocks(request)
            return False
        request.block_ids = hits + own
        request.num_cached = request.num_computed = len(hits) * state.block_size
        return True

    def has_blocks(self, count: int) -> bool:
        """Returns whether `count` blocks are free. Takes back spares if they are needed for that."""
        num_free = self._state.blocks.num_free
        return count <= num_free or (self.take_back_spares() and count <= self._state.blocks.num_free)

    def take_back_spares(self) -> bool:
        """Frees the spare blocks of all rows; returns whether any row had some.

        No round in flight reaches them. The device table still lists them, but a later grant replaces these
        entries before the row reaches them.
        """
        has_freed = False
        for request in self._state.running:
            is_prefilling = request.status is Status.PREFILLING
            length = request.num_tokens if is_prefilling else request.num_computed
            num_needed = self._num_needed(request, length)
            spare = request.block_ids[num_needed:]
            if spare:
                del request.block_ids[num_needed:]
                self._state.blocks.free(spare)
                has_freed = True
        return has_freed

    def _grow_row(self, request: Request, first_new_blocks: list[tuple[Request, int]]) -> None:
        """Grants blocks for the next round of the request, if it lacks some. It may preempt others, or the
        request itself if that is the last in turn."""
        state = self._state
        first = len(request.block_ids)
        missing = self._num_needed(request, request.num_computed) - first
        if missing <= 0:
            return
        while (block_ids := self._allocate(missing + self._num_spare(request, missing))) is None:
            victim = max(state.running, key=state.waiting.turn)
            state.preempt(victim)
            if victim is request:
                return
        request.block_ids += block_ids
        first_new_blocks.append((request, first))

    def _num_needed(self, request: Request, length: int) -> int:
        """Returns the blocks needed for one more round if every round in flight keeps all its drafts.

        With depth 3 and one round in flight from length 10 the row may have reached 14; the next round writes
        positions 14 .. 17, so that blocks for 18 tokens are needed, or for `limit` if that is less.
        """
        window = self._state.depth + 1
        num_tokens = min(request.limit, length + request.num_tokens_in_flight + window)
        return -(-num_tokens // self._state.block_size)

    def _num_spare(self, request: Request, missing: int) -> int:
        """Returns the number of spare blocks to grant, as long as half of the cache stays free (unused cached
        prefixes count as free). They save later grants, and are taken back when another request lacks
        blocks."""
        block_size = self._state.block_size
        num_wanted = -(-request.limit // block_size) - len(request.block_ids) - missing
        num_left = self._state.blocks.num_free - missing - self._num_blocks // 2
        return max(min(SPARE_TOKENS // block_size, num_wanted, num_left), 0)

    def _allocate(self, count: int) -> list[int] | None:
        block_ids = self._state.blocks.allocate(count)
        if block_ids is None and self.take_back_spares():
            block_ids = self._state.blocks.allocate(count)
        return block_ids
