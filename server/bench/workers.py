"""Client processes that wait for their share of a load: a single process could not follow a hundred
streams."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from headway.server.bench.client import Share, ShareResult, run_share


class Workers:
    """Mutable: owns the processes. All of them are running before the first share is sent."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()

    def run(self, shares: Sequence[Share]) -> list[ShareResult]:
        """Runs each share in a process of its own; returns when all have ended."""
        assert len(shares) <= len(self._pipes), (len(shares), len(self._pipes))
        busy = self._pipes[: len(shares)]
        for pipe, share in zip(busy, shares, strict=True):
            pipe.send(share)
        return [pipe.recv() for pipe in busy]


def _work(pipe: Connection) -> None:
    """Runs shares until the other end of the pipe is closed. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send("ready")
    while True:
        try:
            share: Share = pipe.recv()
        except EOFError:
            return
        pipe.send(run_share(share))


def shares_of(whole: Share, num_workers: int) -> list[Share]:
    """Returns the load as shares of nearly equal size; seeds differ, rates add up to the whole."""
    streams = _cut(whole.num_streams, num_workers)
    requests = [None] * num_workers if whole.num_requests is None else _cut(whole.num_requests, num_workers)
    rate = None if whole.request_rate is None else whole.request_rate / num_workers
    return [
        dataclasses.replace(
            whole,
            seed=f"{whole.seed}, worker {worker}",
            num_streams=streams[worker],
            num_requests=requests[worker],
            request_rate=rate,
        )
        for worker in range(num_workers)
    ]


def _cut(number: int, num_parts: int) -> list[int]:
    return [number // num_parts + (part < number % num_parts) for part in range(num_parts)]
