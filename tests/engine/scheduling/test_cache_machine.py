"""Allocator and prefix cache against a model that keeps, for each block, its owners and its whole content."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.request import Request

pytestmark = pytest.mark.timeout(1200)  # a failure is made smaller for up to 300 s
SIZE = 16
Content = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the block's end


class CacheMachine(RuleBasedStateMachine):
    """Requests come with few prompts in many lengths, publish some of their blocks, and leave in any
    order."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.blocks = BlockAllocator(num_blocks)
        self.prefixes = PrefixCache(self.blocks, block_size=SIZE, is_enabled=True)
        self.live: list[Request] = []
        self.num_requests = 0
        self.owners: list[list[int]] = [[] for _ in range(num_blocks)]
        self.found_as: dict[Content, int] = {}  # what is published, and in which block
        self.num_offered: dict[int, int] = {}  # by request: its first blocks, each of which is offered once
        self.idle: list[int] = []  # in the order of eviction

    @rule(
        prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
        tail=st.integers(1, SIZE),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def come(self, prompt: list[int], tail: int, salt: str) -> None:
        tokens = [token for token in prompt for _ in range(SIZE)] + [0] * tail
        request = Request(self.num_requests, tokens, SamplingParams(), max_tokens=1, cache_salt=salt)
        self.num_requests += 1
        hits = self.prefixes.match(request)
        assert hits == self._expected_hits(request)
        num_own = len(tokens) // SIZE + 1 - len(hits)
        self.blocks.share(hits)
        own = self.blocks.allocate(num_own)
        num_idle_hits = sum(not self.owners[block_id] for block_id in hits)
        assert (own is None) == (num_own > self._num_free() - num_idle_hits)
        if own is None:
            self.blocks.free(hits)
            self._model_free_idle(hits)
            return
        self.idle = [block_id for block_id in self.idle if block_id not in hits]
        self._model_take(own)
        request.block_ids = hits + own
        for block_id in request.block_ids:
            self.owners[block_id].append(request.request_id)
        self.live.append(request)
        self.num_offered[request.request_id] = len(hits)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(0, request.num_tokens))
        self.prefixes.publish(request, num_tokens)
        for index in range(self.num_offered[request.request_id], num_tokens // SIZE):
            self.found_as.setdefault(self._content(request, index), request.block_ids[index])
            self.num_offered[request.request_id] = index + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.blocks.free(request.block_ids)
        self.prefixes.forget(request)
        published = set(self.found_as.values())
        for block_id in reversed(request.block_ids):
            self.owners[block_id].remove(request.request_id)
            if not self.owners[block_id] and block_id in published:
                self.idle.append(block_id)

    def _expected_hits(self, request: Request) -> list[int]:
        hits: list[int] = []
        for index in range((request.num_tokens - 1) // SIZE):
            block_id = self.found_as.get(self._content(request, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _content(self, request: Request, index: int) -> Content:
        return (request.cache_salt, tuple(request.prompt_token_ids[: (index + 1) * SIZE]))

    def _num_free(self) -> int:
        return sum(not owners for owners in self.owners)

    def _model_free_idle(self, hits: list[int]) -> None:
        """Hits that nobody else had were shared and given back: they are the most recent now."""
        for block_id in reversed(hits):
            if not self.owners[block_id]:
                self.idle.remove(block_id)
                self.idle.append(block_id)

    def _model_take(self, own: list[int]) -> None:
        """New blocks come from those that hold nothing; idle ones go in their order, and only then."""
        assert len(set(own)) == len(own)
        assert not any(self.owners[block_id] for block_id in own)
        evicted = [block_id for block_id in own if block_id in self.idle]
        assert evicted == self.idle[: len(evicted)]
        assert not evicted or own[-len(evicted) :] == evicted
        self.idle = self.idle[len(evicted) :]
        self.found_as = {what: b for what, b in self.found_as.items() if b not in evicted}

    @invariant()
    def counts_agree(self) -> None:
        assert self.blocks.num_free == self._num_free()
        assert self.blocks.num_used == len(self.owners) - self._num_free()
        assert self.blocks.num_cached == len(self.idle)
        published = set(self.found_as.values())
        assert [self.blocks.is_published(b) for b in range(len(self.owners))] == [
            b in published for b in range(len(self.owners))
        ]

    def teardown(self) -> None:
        for request in self.live:
            self.blocks.free(request.block_ids)
            self.prefixes.forget(request)
        assert self.blocks.num_used == 0
        assert sorted(self.blocks.allocate(len(self.owners)) or []) == list(range(len(self.owners)))


def settings_of(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples, stateful_step_count=100, derandomize=True, deadline=None, database=None
    )


class TestCache(CacheMachine.TestCase):
    settings = settings_of(40)


@pytest.mark.long
class TestCacheLong(CacheMachine.TestCase):
    settings = settings_of(100)
