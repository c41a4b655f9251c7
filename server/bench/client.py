"""Sends requests and notes when their events arrive. One worker process runs one share of the load.

Events are counted, not read: only the last ones, which carry usage or an error, are parsed.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

DONE = b"data: [DONE]"
CHOICE, ERROR, USAGE = b'"choices":[{', b'data: {"error"', b'"usage":{'


@dataclass(frozen=True, slots=True)
class Target:
    """The server that requests go to, and the fields of every body besides its prompt and seed.
    timeout_seconds: how long the server may be silent."""

    base_url: str
    headers: dict[str, str]
    body: dict[str, Any]
    timeout_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """Draws random token ids from a vocabulary, or one of several texts."""

    input_len: int
    vocab_size: int
    texts: tuple[str, ...] = ()

    def draw(self, generator: random.Random) -> str | list[int]:
        if self.texts:
            return generator.choice(self.texts)
        return generator.choices(range(self.vocab_size), k=self.input_len)


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a level. request_rate: arrivals a second, as a Poisson process or, with
    has_even_arrivals, at even intervals; None for a closed loop.

    num_streams: the concurrent requests of a closed loop. num_requests: None for no limit but the time.
    seconds: the time after which no more requests are sent; None for no limit but the number. start_seconds:
    the start by the machine's monotonic clock, the same for all workers.
    """

    target: Target
    prompts: Prompts
    seed: str
    num_streams: int
    request_rate: float | None
    num_requests: int | None
    seconds: float | None
    start_seconds: float
    has_even_arrivals: bool = False


@dataclass(slots=True)
class Outcome:
    """The observations of one request. Mutable while its events arrive. Times in seconds, by the machine's
    monotonic clock.

    gaps: the times between its chunks. completion_tokens, accepted_tokens: from its usage. error: the kind of
    failure.
    """

    start: float
    first: float = 0.0
    end: float = 0.0
    num_chunks: int = 0
    gaps: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The result of a share. cpu_seconds: the processor time of this worker while the share ran, which
    took wall_seconds."""

    outcomes: list[Outcome]
    cpu_seconds: float
    wall_seconds: float


def run_share(share: Share) -> ShareResult:
    """Runs a share in a worker process."""
    return asyncio.run(_run(share))


async def _run(share: Share) -> ShareResult:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(share.target.timeout_seconds)
    async with httpx.AsyncClient(
        base_url=share.target.base_url, headers=share.target.headers, timeout=timeout, limits=limits
    ) as client:
        await asyncio.sleep(max(0.0, share.start_seconds - time.monotonic()))
        cpu, wall = _cpu_seconds(), time.monotonic()
        bodies = _bodies(share)
        run = _closed_loop if share.request_rate is None else _open_loop
        outcomes = await run(client, share, bodies)
        return ShareResult(outcomes, _cpu_seconds() - cpu, time.monotonic() - wall)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _bodies(share: Share) -> Iterator[bytes]:
    """Yields request bodies while more requests must be sent."""
    generator = random.Random(share.seed)
    for _ in count() if share.num_requests is None else range(share.num_requests):
        if share.seconds is not None and time.monotonic() - share.start_seconds >= share.seconds:
            return
        prompt = share.prompts.draw(generator)
        body = share.target.body | {"prompt": prompt, "seed": generator.getrandbits(63)}
        yield json.dumps(body).encode()


async def _closed_loop(client: httpx.AsyncClient, share: Share, bodies: Iterator[bytes]) -> list[Outcome]:
    """Runs streams, each of which sends its next request when the last one has ended."""
    outcomes: list[Outcome] = []

    async def stream() -> None:
        for body in bodies:
            outcomes.append(await send(client, body))

    await asyncio.gather(*(stream() for _ in range(share.num_streams)))
    return outcomes


async def _open_loop(client: httpx.AsyncClient, share: Share, bodies: Iterator[bytes]) -> list[Outcome]:
    """Sends each request when it is due, whether earlier ones have ended or not."""
    tasks: list[asyncio.Task[Outcome]] = []
    for due, body in zip(_arrivals(share), bodies, strict=False):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(send(client, body)))
    return list(await asyncio.gather(*tasks))


def _arrivals(share: Share) -> Iterator[float]:
    """Yields the times at which requests are due, by the machine's monotonic clock, until the level's time
    is over."""
    rate = share.request_rate
    assert rate is not None
    gaps, seconds = random.Random(f"{share.seed}, arrivals"), 0.0
    for number in count(1):
        seconds = number / rate if share.has_even_arrivals else seconds + gaps.expovariate(rate)
        if share.seconds is not None and seconds >= share.seconds:
            return
        yield share.start_seconds + seconds


async def send(client: httpx.AsyncClient, body: bytes) -> Outcome:
    """Sends one request. Failures of the server or the network are not raised: they are the outcome."""
    outcome = Outcome(time.monotonic())
    try:
        request = client.stream(
            "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        async with request as response:
            if response.status_code == 200:
                await _read_events(response, outcome)
            else:
                outcome.error = f"status {response.status_code}"
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.end = outcome.end or time.monotonic()
    return outcome


async def _read_events(response: httpx.Response, outcome: Outcome) -> None:
    """Reads the events of a stream. A stream that ends without its last line was cut off."""
    rest, last = b"", 0.0
    async for piece in response.aiter_raw():
        now = time.monotonic()
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event == DONE:
                return
            if event.startswith(ERROR):
                outcome.error = f"event {_json(event)['error'].get('code')}"
                return
            if CHOICE in event:
                outcome.num_chunks += 1
                if last:
                    outcome.gaps.append(now - last)
                else:
                    outcome.first = now
                outcome.end = last = now
            if USAGE in event:
                _take_usage(outcome, _json(event)["usage"])
    outcome.error = "cut off"


def _take_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    outcome.completion_tokens = usage["completion_tokens"]
    outcome.accepted_tokens = (usage.get("completion_tokens_details") or {}).get(
        "accepted_prediction_tokens", 0
    )


def _json(event: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return content
