"""Waiting for what comes by itself, with a limit that only a fault reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits while the event loop runs. Raises AssertionError where the condition does not become true in
    time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        await asyncio.sleep(0.005)


def wait_until(is_true: Callable[[], bool], seconds: float, missed: str) -> None:
    """Does the same for a test without an event loop. Raises AssertionError with `missed` where the condition
    does not become true in time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"{missed} after {seconds} s"
        time.sleep(0.1)
