"""Encodes long texts outside the event loop: one long text at a time, and with a limit on the waiting
bytes."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headway.server.base.errors import RETRY_AFTER, ApiError

INLINE_CHARACTERS = 1024  # about 1 ms of work, for which another thread is no faster
LONG_CHARACTERS = 1 << 17  # longer texts wait for each other, so that shorter ones find a free thread
MAX_WAITING_BYTES = 48 * 2**20
SHORT_THREADS = 2
TRIM_SECONDS = 1.0
M_MMAP_THRESHOLD = -3  # from mallopt(3)
MMAP_BYTES = 1 << 17  # glibc's own threshold at start

Result = TypeVar("Result")


class EncodingPool:
    """Mutable: owns the threads, and counts the bytes of texts that wait or are being encoded, and of
    those encoded since memory was given back; `run_of` and its callees are the only writers."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        _fix_mmap_threshold()
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._untrimmed_bytes = 0
        self._is_trim_due = False
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")

    async def run(self, texts: list[str], work: Callable[[], Result]) -> Result:
        """Returns the result of `work`, which encodes the texts. Raises ApiError (503) while too many
        texts wait."""
        return await self.run_of(sum(map(len, texts)), sum(map(sys.getsizeof, texts)), work)

    async def run_of(self, num_characters: int, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Runs work that costs as much as the encoding of a text of this size, like `run`."""
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
            executor = self._long if is_long else self._short
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            self._waiting_bytes -= num_bytes
            self._trim_later(num_bytes)

    def _trim_later(self, num_bytes: int) -> None:
        """Gives memory back once the bodies and answers of the work are freed, too."""
        self._untrimmed_bytes += num_bytes
        if self._untrimmed_bytes > LONG_CHARACTERS and not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_trim_due = False
        self._untrimmed_bytes = 0
        self._long.submit(give_memory_back)


def give_memory_back() -> None:
    """Returns freed memory that the C library has retained to the system; only with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _fix_mmap_threshold() -> None:
    """Lets large blocks have their own mappings, which return to the system. glibc would raise the
    threshold with each block that is freed, and then place large blocks between small ones that live on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
