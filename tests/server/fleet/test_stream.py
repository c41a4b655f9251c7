"""Parts of streams put together on their way, and the marks taken out of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest

from headway.engine import TokenEvent
from headway.server.base.continuation import Journal
from headway.server.fleet.stream import (
    COALESCE_SECONDS,
    MAX_BUFFERED_BYTES,
    MAX_PARTS_PER_SECOND,
    coalesced,
    seconds_between,
    without_marks,
)


async def coming(
    parts: Sequence[bytes], seconds: float = 0.0, error: Exception | None = None
) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(seconds)
    if error is not None:
        raise error


async def test_the_first_part_comes_at_once_and_the_others_together() -> None:
    async with aclosing(coalesced(coming([b"a", b"b", b"c", b"d"], 0.01), lambda: 0.5)) as parts:
        clock = asyncio.get_running_loop().time
        started = clock()
        assert await anext(parts) == b"a"
        assert clock() - started < 0.25
        assert [part async for part in parts] == [b"bcd"]
        assert clock() - started < 0.5, "the end is not waited for"


async def test_parts_are_sent_before_the_end_when_their_time_has_come() -> None:
    parts = [part async for part in coalesced(coming([b"x"] * 20, 0.02), lambda: 0.1)]
    assert b"".join(parts) == b"x" * 20
    assert 3 <= len(parts) <= 8


async def test_an_error_comes_after_all_that_came_before_it() -> None:
    async with aclosing(coalesced(coming([b"a", b"b"], error=ConnectionError()), lambda: 0.01)) as parts:
        assert [await anext(parts), await anext(parts)] == [b"a", b"b"]
        with pytest.raises(ConnectionError):
            await anext(parts)


async def test_nothing_is_read_for_a_reader_that_has_left() -> None:
    is_closed = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.001)
        finally:
            is_closed.set()

    source = endless()
    async with aclosing(coalesced(source, lambda: 0.01)) as parts:
        assert await anext(parts)
    await asyncio.wait_for(is_closed.wait(), 30)


async def test_a_slow_reader_holds_up_what_is_read() -> None:
    piece, num_read = b"x" * 2**16, 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield piece
            await asyncio.sleep(0)

    async with aclosing(coalesced(endless(), lambda: 0.01)) as parts:
        await anext(parts)
        await asyncio.sleep(0.2)
        assert num_read * len(piece) <= 2 * MAX_BUFFERED_BYTES


def test_many_streams_get_their_parts_less_often() -> None:
    assert seconds_between(1) == COALESCE_SECONDS
    assert 1000 / seconds_between(1000) == MAX_PARTS_PER_SECOND


@pytest.mark.parametrize("seed", range(5))
async def test_marks_are_taken_out_however_a_stream_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    journal, stream, body, told = Journal(0), b"", b"", []
    for i in range(1, 40):
        for j in range(chance.randrange(3)):
            journal.add(TokenEvent(j, [i]))
        part = b'data: {"text": ": headway 7 [] \\n\\n: headway 8 []"}\n\n' * chance.randrange(1, 3)
        mark = journal.mark(i)
        body += part
        stream += part + mark
        told += [mark.split(b" ", 3)[3].strip()]
    cuts = sorted(chance.sample(range(1, len(stream)), 60))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    seen = b""
    parts = [part async for part in without_marks(coming(pieces))]
    for part in parts:
        seen += part.body
        assert body.startswith(seen)
        assert body[: len(seen)] == seen
    assert seen == body
    assert [event for part in parts for event in part.told] == [events for events in told if events != b"[]"]
    assert parts[-1].num_sent == 39
