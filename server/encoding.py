"""Runs the encoding of long texts beside the event loop: one long text at a time, and a bound on what waits."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headway.server.errors import RETRY_AFTER, ApiError

INLINE_CHARACTERS = 1024  # about 1 ms of work, which another thread would not do sooner
LONG_CHARACTERS = 1 << 17  # longer texts wait for each other, so that shorter ones find a free thread
MAX_WAITING_BYTES = 48 * 2**20
SHORT_THREADS = 2

Result = TypeVar("Result")


class EncodingPool:
    """Mutable: the threads, and the bytes of the texts that wait or are encoded; `run` is their only writer."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")

    async def run(self, texts: list[str], work: Callable[[], Result]) -> Result:
        """The result of `work`, which encodes the texts. Raises ApiError (503) while too many texts wait."""
        return await self.run_of(sum(map(len, texts)), sum(map(sys.getsizeof, texts)), work)

    async def run_of(self, num_characters: int, num_bytes: int, work: Callable[[], Result]) -> Result:
        """As `run`, for work that costs as much as a text of that size."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise ApiError(
                f"{self._waiting_bytes} bytes of text wait to be tokenized, with this one {num_bytes} more; the "
                f"limit is {self._max_waiting_bytes}; try again later",
                status=503,
                code="too_much_text",
                headers=RETRY_AFTER,
            )
        is_long = num_characters > LONG_CHARACTERS
        self._waiting_bytes += num_bytes
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._long if is_long else self._short, _trimmed(work) if is_long else work
            )
        finally:
            self._waiting_bytes -= num_bytes


def _trimmed(work: Callable[[], Result]) -> Callable[[], Result]:
    def run() -> Result:
        try:
            return work()
        finally:
            give_memory_back()

    return run


def give_memory_back() -> None:
    """Returns what the C library has kept of freed memory to the system; glibc only, elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
