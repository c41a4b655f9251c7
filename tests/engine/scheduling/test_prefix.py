"""A request finds the blocks that hold its own beginning, and no others."""

from __future__ import annotations

import pytest

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.request import Request

SIZE = 16


def cache(blocks: BlockAllocator, *, is_enabled: bool = True) -> PrefixCache:
    return PrefixCache(blocks, block_size=SIZE, is_enabled=is_enabled)


def request(request_id: int, prompt: list[int], *, output: tuple[int, ...] = (), salt: str = "") -> Request:
    made = Request(request_id, prompt, SamplingParams(), max_tokens=100, cache_salt=salt)
    made.output_token_ids += output
    return made


def published(
    blocks: BlockAllocator, prefixes: PrefixCache, prompt: list[int], *, salt: str = ""
) -> list[int]:
    """The blocks of a request that was computed in full."""
    owner = request(1000 + sum(prompt), prompt, salt=salt)
    block_ids = blocks.allocate(len(prompt) // SIZE)
    assert block_ids is not None
    owner.block_ids = block_ids
    prefixes.publish(owner, len(prompt))
    return block_ids


@pytest.mark.parametrize(
    ("length", "num_hits"),
    [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3), (64, 3)],
    ids=str,
)
def test_the_last_token_is_never_covered(length: int, num_hits: int) -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    prompt = list(range(64))
    block_ids = published(blocks, prefixes, prompt)
    assert prefixes.match(request(0, prompt[:length])) == block_ids[:num_hits]


@pytest.mark.parametrize("changed", [0, 15, 16, 40, 47], ids=str)
def test_a_match_ends_at_the_first_block_with_another_token(changed: int) -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    prompt = list(range(60))
    block_ids = published(blocks, prefixes, prompt)
    other = [*prompt[:changed], 999, *prompt[changed + 1 :]]
    assert prefixes.match(request(0, other)) == block_ids[: changed // SIZE]


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    same = [7] * SIZE
    block_ids = published(blocks, prefixes, [*([1] * SIZE), *same])
    assert prefixes.match(request(0, [*same, 0])) == []
    assert prefixes.match(request(1, [*([1] * SIZE), *same, 0])) == block_ids


def test_output_tokens_are_part_of_the_chain() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    prompt = list(range(40))
    block_ids = published(blocks, prefixes, prompt)
    preempted = request(0, prompt[:20], output=tuple(prompt[20:]))
    assert prefixes.match(preempted) == block_ids


def test_a_match_has_the_same_salt() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    prompt = list(range(40))
    block_ids = published(blocks, prefixes, prompt, salt="salt")
    assert prefixes.match(request(0, prompt, salt="salt")) == block_ids
    assert prefixes.match(request(1, prompt)) == prefixes.match(request(2, prompt, salt="salt2")) == []


@pytest.mark.parametrize(
    ("num_tokens", "num_published"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)], ids=str
)
def test_only_full_blocks_are_published(num_tokens: int, num_published: int) -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    owner = request(0, list(range(40)))
    owner.block_ids = blocks.allocate(3) or []
    prefixes.publish(owner, num_tokens)
    assert sum(map(blocks.is_published, owner.block_ids)) == num_published


def test_blocks_behind_one_that_another_published_first_are_published_still() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    prompt = list(range(40))
    early = published(blocks, prefixes, prompt[:16])
    late = published(blocks, prefixes, prompt)
    assert prefixes.match(request(0, prompt)) == [early[0], late[1]]


def test_after_an_eviction_within_a_prefix_only_what_stands_before_it_matches() -> None:
    blocks = BlockAllocator(3)
    prefixes = cache(blocks)
    prompt = list(range(49))
    block_ids = published(blocks, prefixes, prompt)
    blocks.free(block_ids)
    blocks.allocate(1)
    assert prefixes.match(request(0, prompt)) == block_ids[:2]


def test_a_request_that_starts_anew_publishes_anew_what_was_evicted() -> None:
    blocks = BlockAllocator(2)
    prefixes = cache(blocks)
    owner = request(0, list(range(40)))
    owner.block_ids = blocks.allocate(2) or []
    prefixes.publish(owner, 40)
    blocks.free(owner.block_ids)
    blocks.free(blocks.allocate(2) or [])
    assert prefixes.match(owner) == []
    owner.block_ids = blocks.allocate(2) or []
    prefixes.publish(owner, 40)
    assert prefixes.match(owner) == owner.block_ids


def test_a_disabled_cache_finds_and_publishes_nothing() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks, is_enabled=False)
    prompt = list(range(40))
    block_ids = published(blocks, prefixes, prompt)
    assert not any(map(blocks.is_published, block_ids))
    assert prefixes.match(request(0, prompt)) == []


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    owner = request(0, list(range(64)))
    read: list[tuple[int, int]] = []
    original = Request.token_ids
    monkeypatch.setattr(Request, "token_ids", lambda r, a, b: (read.append((a, b)), original(r, a, b))[1])
    prefixes.match(owner)
    owner.block_ids = blocks.allocate(4) or []
    for num_tokens in range(65):
        prefixes.publish(owner, num_tokens)
    prefixes.match(owner)
    assert read == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_what_a_request_published_stays_when_it_has_ended() -> None:
    blocks = BlockAllocator(8)
    prefixes = cache(blocks)
    owner = request(0, list(range(40)))
    owner.block_ids = blocks.allocate(2) or []
    prefixes.publish(owner, 40)
    prefixes.forget(owner)
    assert prefixes.match(request(1, list(range(40)))) == owner.block_ids
    assert list(prefixes._chains) == [1]
