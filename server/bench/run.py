"""One run: level after level against one server."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import httpx

from headway.server.bench.client import Prompts, Share, ShareResult, Target
from headway.server.bench.figures import Figures, Level, References, figures_of
from headway.server.bench.server_side import read_metrics
from headway.server.bench.workers import Workers, shares_of

START_SECONDS = 0.5  # for all workers to have their share
WARM_TOKENS = 8
LEAST_REQUESTS, REQUESTS_PER_STREAM = 8, 4


@dataclass(frozen=True, slots=True)
class Run:
    """What the levels share. num_requests, seconds: of each; with neither a few requests a stream."""

    workers: Workers
    num_workers: int
    client: httpx.Client
    target: Target
    prompts: Prompts
    num_requests: int | None
    seconds: float | None
    seed: int

    def measure(self, level: Level, references: References) -> Figures:
        """After a warm-up. Raises httpx.HTTPError when the server says nothing of itself any more."""
        self._warm_up(level)
        before = read_metrics(self.client)
        results = self._spread(self._load(level))
        return figures_of(level, results, before, read_metrics(self.client), references)

    def _load(self, level: Level) -> Share:
        requests = self.num_requests
        if requests is None and self.seconds is None:
            requests = max(LEAST_REQUESTS, REQUESTS_PER_STREAM * level.num_streams)
        return Share(
            target=self.target,
            prompts=self.prompts,
            seed=f"{self.seed}, {level}",  # no prompt comes twice: the server may keep prefixes
            num_streams=level.num_streams,
            request_rate=level.request_rate,
            num_requests=requests,
            seconds=self.seconds,
            start_seconds=time.monotonic() + START_SECONDS,
        )

    def _warm_up(self, level: Level) -> None:
        """One short request a stream: connections are open, and whatever is compiled late has been."""
        body = self.target.body | {"max_tokens": WARM_TOKENS}
        self._spread(
            dataclasses.replace(
                self._load(level),
                target=dataclasses.replace(self.target, body=body),
                seed=f"{self.seed}, {level}, warm-up",
                request_rate=None,
                num_requests=level.num_streams,
                seconds=None,
            )
        )

    def _spread(self, whole: Share) -> list[ShareResult]:
        """A closed loop takes no more workers than it has streams."""
        num_workers = self.num_workers
        if whole.request_rate is None:
            num_workers = min(num_workers, whole.num_streams)
        return self.workers.run(shares_of(whole, num_workers))
