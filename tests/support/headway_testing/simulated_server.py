"""Requests that the real scheduler serves in simulated time: a 7B model on an H200. As in the engine's loop,
a step is planned shortly before the preceding one is done, and read once the next one is launched."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.protocol.stats import StageSeconds
from headway.engine.scheduling.plan import Plan, StepResult
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler
from headway_testing.simulated_rounds import H200, HIGH, MAX_DEPTH, ROW_COUNTS, new_policy

# Milliseconds of a pass of prompts alone by its tokens, and what 128 prompt tokens add to a round's pass.
ALONE = ((0, 6.0), (128, 8.3), (1024, 25.0), (8192, 200.0))
MIXED_STEP, MIXED_MILLISECONDS = 128, 2.5
# Time that the API process takes for a request, and time between two requests of a client.
REQUEST_SECONDS, CLIENT_SECONDS = 3e-4, 2e-3
# Time between planning a step and the end of the preceding one.
PLAN_SECONDS = 2e-3
POLICY = PrefillPolicy(idle=8192, separate=1024, mixed=384, mixed_above_tokens=8)
VOCAB_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 1 << 16, 1 << 15, 1 << 17


def step_seconds(plan: Plan) -> float:
    """Returns the time of a step. Rounds are padded to the row counts that have graphs, prompt tokens in
    their passes to MIXED_STEP."""
    num_rows, num_tokens = len(plan.decode_request_ids), sum(len(chunk.token_ids) for chunk in plan.prefill)
    if num_rows == 0:
        return _between(ALONE, num_tokens) / 1e3
    lines = sorted((rows, line[plan.depth]) for (context, rows), line in H200.items() if context == 128)
    of_round = _between(lines, next(n for n in ROW_COUNTS if n >= num_rows))
    return (of_round + MIXED_MILLISECONDS * -(-num_tokens // MIXED_STEP)) / 1e3


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[min(int(len(values) * percent / 100), len(values) - 1)]


def _between(points: Sequence[tuple[int, float]], x: float) -> float:
    right = min(bisect_right([at for at, _ in points], x), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass
class Stream:
    """One request's times in seconds: when it was sent, and when tokens of it came. num_tokens: that come in
    all."""

    sent: float
    num_tokens: int
    times: list[float] = field(default_factory=list)

    @property
    def first_seconds(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class SimulatedServer:
    """depth: of every round, or "auto"; drafts are accepted 0.9, 0.8 and 0.7 times in a round. plans: of all
    steps that were read."""

    def __init__(
        self,
        depth: int | str,
        *,
        max_depth: int,
        prompt_len: int = 128,
        output_len: int = 256,
        max_running: int = 256,
        seed: int = 0,
    ) -> None:
        self.streams: list[Stream] = []
        self.plans: list[Plan] = []
        self._prompt_len, self._output_len = prompt_len, output_len
        self._random = random.Random(seed)
        self._now = self._device_free = self._api_free = 0.0
        self._in_flight: deque[tuple[Plan, float]] = deque()  # with the time of its end
        self._arrivals: list[tuple[float, int]] = []
        self._num_left = 0
        config = EngineConfig(
            model_path="none", depth=max_depth, chooses_depth=depth == "auto", max_running=max_running,
            mixed_above_tokens=POLICY.mixed_above_tokens,
        )  # fmt: skip
        self._scheduler = Scheduler(
            config, num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE,
            drafter=DRAFTER_TRAITS["mtp"], prefill=POLICY,
            clock=lambda: self._now,
        )  # fmt: skip
        if max_depth == MAX_DEPTH:
            self._scheduler.set_depth_policy(new_policy(H200))
        if depth != "auto":
            self._scheduler.set_depth(int(depth))

    @property
    def tokens_per_second(self) -> float:
        num_tokens = sum(stream.num_tokens for stream in self.streams)
        return num_tokens / max(stream.times[-1] for stream in self.streams)

    def closed_loop(self, num_streams: int, num_requests: int) -> None:
        """Sends a request for each one that ends."""
        for _ in range(num_streams):
            self.send(0.0)
        self._num_left = num_requests - num_streams
        self._run()

    def open_loop(self, rate: float, num_requests: int) -> None:
        """Sends requests as a Poisson process."""
        at = 0.0
        for _ in range(num_requests):
            at += self._random.expovariate(rate)
            self.send(at)
        self._run()

    def send(self, at: float, *, output_len: int | None = None) -> None:
        self._api_free = max(self._api_free, at) + REQUEST_SECONDS
        heapq.heappush(self._arrivals, (self._api_free, len(self.streams)))
        self.streams.append(Stream(at, output_len or self._output_len))

    def _run(self) -> None:
        while self._arrivals or self._scheduler.has_work or self._in_flight:
            if self._in_flight:
                self._now = max(self._now, self._in_flight[-1][1] - PLAN_SECONDS)
            elif not self._scheduler.has_work:
                self._now = max(self._now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self._now:
                self._add(heapq.heappop(self._arrivals)[1])
            plan = self._scheduler.plan()
            if plan is not None:
                self._device_free = max(self._device_free, self._now) + step_seconds(plan)
                self._in_flight.append((plan, self._device_free))
            while self._in_flight and (plan is None or len(self._in_flight) > 1):
                self._read(*self._in_flight.popleft())

    def _add(self, number: int) -> None:
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(self._prompt_len)]
        request = Request(number, prompt, SamplingParams(seed=0), self.streams[number].num_tokens)
        self._scheduler.add(request)

    def _read(self, plan: Plan, end: float) -> None:
        self._now = max(self._now, end)
        self.plans.append(plan)
        emitted = tuple((1,) * self._num_emitted(i, plan.depth) for i in plan.decode_request_ids)
        first, seconds = tuple(1 for chunk in plan.prefill if chunk.is_last), step_seconds(plan)
        stages = StageSeconds(target=seconds) if plan.decode_request_ids else StageSeconds(prefill=seconds)
        for event in self._scheduler.update(plan, StepResult(first, emitted, seconds=stages)):
            self.streams[event.request_id].times.append(end)
            if event.finish_reason is not None and self._num_left > 0:
                self._num_left -= 1
                self.send(end + CLIENT_SECONDS)

    def _num_emitted(self, request_id: int | None, depth: int) -> int:
        """Returns the tokens that a row of the round gets; of padding and of ended requests they do not
        count."""
        request = self._scheduler.state.requests.get(request_id) if request_id is not None else None
        if request is None:
            return 0 if request_id is None else 1
        drawn, most = self._random.random(), min(depth, request.limit - request.num_tokens)
        return 1 + sum(drawn < rate for rate in HIGH[:most])
