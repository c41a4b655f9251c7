"""One run, which measures level after level on one server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from headway.server.bench.client import Prompts, Share, ShareResult, Target
from headway.server.bench.figures import Figures, Level, References, figures_of
from headway.server.bench.server_side import read_metrics
from headway.server.bench.workers import Workers, shares_of

START_SECONDS = 0.5  # until all workers have received their share
WARM_TOKENS = 8
LEAST_REQUESTS, REQUESTS_PER_STREAM = 8, 4


@dataclass(frozen=True, slots=True)
class Run:
    """The settings that all levels share. num_requests, seconds: the limits of each level; without either,
    a few requests are sent for each stream."""

    workers: Workers
    num_workers: int
    client: httpx.Client
    target: Target
    prompts: Prompts
    num_requests: int | None
    seconds: float | None
    seed: int

    def measure(self, level: Level, references: References) -> Figures:
        """Measures a level after a warm-up. Raises httpx.HTTPError if the server's metrics cannot be read."""
        return self.measure_beside(level, references, [])[0]

    def measure_beside(
        self, level: Level, references: References, others: Sequence[Share]
    ) -> tuple[Figures, list[ShareResult]]:
        """Measures a level while other shares are sent, each by a worker of its own. Returns the level's
        figures and the results of the other shares."""
        self._warm_up(level)
        before = read_metrics(self.client)
        load = self.load(level)
        shares = self._cut(load)
        others = [dataclasses.replace(other, start_seconds=load.start_seconds) for other in others]
        results = self.workers.run([*shares, *others])
        own = results[: len(shares)]
        return figures_of(level, own, before, read_metrics(self.client), references), results[len(shares) :]

    def load(self, level: Level) -> Share:
        requests = self.num_requests
        if requests is None and self.seconds is None:
            requests = max(LEAST_REQUESTS, REQUESTS_PER_STREAM * level.num_streams)
        return Share(
            target=self.target,
            prompts=self.prompts,
            seed=f"{self.seed}, {level}",  # no prompt is repeated: the server may cache prefixes
            num_streams=level.num_streams,
            request_rate=level.request_rate,
            num_requests=requests,
            seconds=self.seconds,
            start_seconds=time.monotonic() + START_SECONDS,
        )

    def _warm_up(self, level: Level) -> None:
        """Sends one short request for each stream, which opens connections and triggers late compilation."""
        body = self.target.body | {"max_tokens": WARM_TOKENS}
        self.spread(
            dataclasses.replace(
                self.load(level),
                target=dataclasses.replace(self.target, body=body),
                seed=f"{self.seed}, {level}, warm-up",
                request_rate=None,
                num_requests=level.num_streams,
                seconds=None,
            )
        )

    def spread(self, whole: Share) -> list[ShareResult]:
        return self.workers.run(self._cut(whole))

    def _cut(self, whole: Share) -> list[Share]:
        """Cuts a share into one for each worker. A closed loop uses no more workers than it has streams."""
        num_workers = self.num_workers
        if whole.request_rate is None:
            num_workers = min(num_workers, whole.num_streams)
        return shares_of(whole, num_workers)
