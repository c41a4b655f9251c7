"""The benchmark's client: what it makes of a stream, whatever pieces it comes in, and of what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from headway.server.bench.client import Outcome, Prompts, Share, Target, run_share, send
from headway.server.bench.workers import shares_of

CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"ab \\"usage\\":{","finish_reason":null}],"usage":null}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9,"total_tokens":11,' \
    b'"completion_tokens_details":{"accepted_prediction_tokens":5,"rejected_prediction_tokens":1}}}\n\n'  # fmt: skip
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
ERROR = b'data: {"error":{"message":"no","type":"server_error","param":null,"code":"internal_error"}}\n\n'


class Pieces(httpx.AsyncByteStream):
    def __init__(self, content: bytes, size: int) -> None:
        self._pieces = [content[i : i + size] for i in range(0, len(content), size)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def sent(content: bytes, *, size: int = 1 << 20, status: int = 200) -> Outcome:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Pieces(content, size)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await send(client, b"{}")


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
async def test_events_are_counted_however_they_are_cut(size: int) -> None:
    outcome = await sent(CHUNK * 2 + COMMENT + CHUNK + USAGE + DONE, size=size)
    assert outcome.error is None
    assert (outcome.num_chunks, len(outcome.gaps)) == (3, 2)
    assert (outcome.completion_tokens, outcome.accepted_tokens) == (9, 5)
    assert outcome.start <= outcome.first <= outcome.end <= time.monotonic()
    assert sum(outcome.gaps) == pytest.approx(outcome.end - outcome.first)


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        (CHUNK + ERROR + DONE, 200, "event internal_error"),
        (CHUNK + CHUNK, 200, "cut off"),
        (b"", 429, "status 429"),
    ],
    ids=["event", "cut-off", "status"],
)
async def test_what_goes_wrong_is_told_by_kind(content: bytes, status: int, error: str) -> None:
    assert (await sent(content, status=status)).error == error


async def test_a_server_that_is_not_there_is_an_outcome() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
        outcome = await send(client, b"{}")
    assert outcome.error == "ConnectError"
    assert outcome.end >= outcome.start


async def test_a_text_about_usage_is_not_taken_for_one() -> None:
    """Quotes inside a text are escaped, so the words of the last event cannot come from a text."""
    assert json.loads(CHUNK.removeprefix(b"data: "))["choices"][0]["text"] == 'ab "usage":{'
    assert (await sent(CHUNK + DONE)).completion_tokens == 0


def share(**changes: object) -> Share:
    fields = {
        "target": Target("http://x", {}, {}),
        "prompts": Prompts(5, 100),
        "seed": "0",
        "num_streams": 10,
        "request_rate": None,
        "num_requests": 23,
        "seconds": None,
        "start_seconds": 0.0,
    }
    return Share(**{**fields, **changes})  # type: ignore[arg-type]


def test_shares_add_up_to_the_whole() -> None:
    shares = shares_of(share(request_rate=3.0), 4)
    assert [s.num_streams for s in shares] == [3, 3, 2, 2]
    assert [s.num_requests for s in shares] == [6, 6, 6, 5]
    assert sum(s.request_rate or 0 for s in shares) == pytest.approx(3.0)
    assert len({s.seed for s in shares}) == 4


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What a share sends; every answer is one chunk."""
    seen: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, stream=Pieces(CHUNK + USAGE + DONE, 1 << 20))

    real = httpx.AsyncClient

    def client(**options: object) -> httpx.AsyncClient:
        return real(**{**options, "transport": httpx.MockTransport(answer)})  # type: ignore[arg-type]

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return seen


@pytest.mark.parametrize("rate", [None, 1000.0], ids=["closed", "open"])
def test_a_share_sends_its_requests_no_two_alike(rate: float | None, bodies: list[dict[str, object]]) -> None:
    target = Target("http://x", {}, {"max_tokens": 7})
    result = run_share(share(target=target, request_rate=rate, start_seconds=time.monotonic()))
    assert len(bodies) == len(result.outcomes) == 23
    assert len({(str(body["prompt"]), body["seed"]) for body in bodies}) == 23
    for body in bodies:
        assert body["max_tokens"] == 7
        assert len(body["prompt"]) == 5
        assert max(body["prompt"]) < 100
    assert result.wall_seconds > 0


def test_texts_are_sent_where_there_are_some(bodies: list[dict[str, object]]) -> None:
    run_share(share(prompts=Prompts(5, 0, ("a", "b")), start_seconds=time.monotonic()))
    assert {body["prompt"] for body in bodies} == {"a", "b"}


def test_no_request_is_sent_after_the_time_is_over(bodies: list[dict[str, object]]) -> None:
    started = time.monotonic()
    result = run_share(share(num_requests=None, seconds=1.0, start_seconds=started, num_streams=2))
    assert len(result.outcomes) > 2
    assert max(outcome.start for outcome in result.outcomes) - started < 1.0 + 1.0


@pytest.mark.parametrize(("seconds", "num_requests"), [(0.375, 0), (0.5, 0), (0.75, 1)])
def test_no_request_is_sent_that_is_due_when_the_time_is_over(
    seconds: float, num_requests: int, bodies: list[dict[str, object]]
) -> None:
    load = share(num_requests=None, seconds=seconds, request_rate=2.0, has_even_arrivals=True)
    result = run_share(dataclasses.replace(load, start_seconds=time.monotonic()))
    assert len(result.outcomes) == len(bodies) == num_requests
    assert result.wall_seconds < 1.0  # the next would be due


def test_arrivals_are_as_many_as_the_rate_says(bodies: list[dict[str, object]]) -> None:
    result = run_share(
        share(num_requests=None, seconds=1.0, request_rate=200.0, start_seconds=time.monotonic())
    )
    assert 200 - 5 * 200**0.5 < len(result.outcomes) < 200 + 5 * 200**0.5


def test_even_arrivals_are_as_far_apart_as_the_rate_says(bodies: list[dict[str, object]]) -> None:
    started = time.monotonic()
    result = run_share(share(num_requests=6, request_rate=4.0, has_even_arrivals=True, start_seconds=started))
    starts = [outcome.start - started for outcome in result.outcomes]
    assert starts == pytest.approx([0.25 * n for n in range(1, 7)], abs=0.12)
