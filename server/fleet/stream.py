"""Parts of a streamed answer put together: each that goes through Ray costs some 0.2 ms, however short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

COALESCE_SECONDS = 0.015
MAX_BUFFERED_BYTES = 2**20  # beyond that nothing is read until the reader has caught up


async def coalesced(
    parts: AsyncIterator[bytes], seconds: float = COALESCE_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yields the first part at once, and then at most every `seconds` all that has come. Raises as `parts`
    does, after what came before."""
    buffer = bytearray()
    has_news, has_room = asyncio.Event(), asyncio.Event()
    has_room.set()

    async def read() -> None:
        async for part in parts:
            buffer.extend(part)
            has_news.set()
            if len(buffer) >= MAX_BUFFERED_BYTES:
                has_room.clear()
                await has_room.wait()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: has_news.set())
    try:
        while True:
            await has_news.wait()
            has_news.clear()
            if buffer:
                taken = bytes(buffer)
                buffer.clear()
                has_room.set()
                yield taken
            if reading.done():
                if not buffer:
                    break
                has_news.set()
                continue
            await asyncio.wait([reading], timeout=seconds)
        reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
