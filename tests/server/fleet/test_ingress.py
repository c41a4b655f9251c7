"""The ingress before replicas that answer, refuse and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from headway.server.fleet.ingress import MAX_CONTINUATIONS, Proxy, Replicas
from headway.server.fleet.messages import ForwardedRequest, Part, ReplicaError, ResponseStart

STREAM = [(b"content-type", b"text/event-stream")]


class Answer:
    """One replica's: its parts, then its end or a break. Mutable: notes whether it was let go."""

    def __init__(self, *parts: ResponseStart | Part, breaks: bool = False) -> None:
        self._parts = parts
        self._breaks = breaks
        self.is_over = False

    async def __aiter__(self) -> AsyncIterator[ResponseStart | Part]:
        for part in self._parts:
            await asyncio.sleep(0)
            yield part
        if self._breaks:
            raise ReplicaError("a test")

    def cancel(self) -> None:
        self.is_over = True


def begun(body: bytes, told: bytes, num_sent: int, *, status: int = 200) -> ResponseStart:
    return ResponseStart(status, STREAM, Part(body, (told,), num_sent), is_journaled=True)


class Fleet:
    """Mutable: gives its answers one after the other, and keeps the requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.requests: list[ForwardedRequest] = []

    def forward(self, request: ForwardedRequest) -> Answer:
        self.requests.append(request)
        return self.answers[len(self.requests) - 1]

    def client(self, max_body_bytes: int = 1000) -> httpx.AsyncClient:
        proxy = Proxy(Replicas(self.forward, (ReplicaError,), max_body_bytes))
        return httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://fleet")


async def test_a_request_goes_on_as_it_came_and_so_does_its_answer() -> None:
    headers = [(b"X-Some", b"a"), (b"x-some", b"b"), (b"content-length", b"6")]
    fleet = Fleet(Answer(ResponseStart(418, headers, Part(b"abc")), Part(b"def")))
    async with fleet.client() as client:
        sent = {"Authorization": "Bearer k", "Connection": "close", "TE": "trailers"}
        answer = await client.request("PATCH", "/a%2Fb/%20?q=%20&q=2", content=b"\xff\x00", headers=sent)
    assert (answer.status_code, answer.content) == (418, b"abcdef")
    assert answer.headers.get_list("x-some") == ["a", "b"]
    (request,) = fleet.requests
    assert (request.method, request.target, request.body) == ("PATCH", "/a%2Fb/%20?q=%20&q=2", b"\xff\x00")
    names = [name for name, _ in request.headers]
    assert b"authorization" in names
    assert not {b"connection", b"te"} & set(names)
    assert fleet.answers[0].is_over


async def test_a_body_is_cut_right_behind_the_limit() -> None:
    fleet = Fleet(Answer(ResponseStart(413, [], Part(b""))))
    async with fleet.client(max_body_bytes=10) as client:
        await client.post("/v1/completions", content=b"x" * 500)
    assert fleet.requests[0].body == b"x" * 11


async def test_a_stream_goes_on_in_another_replica_with_what_was_told() -> None:
    fleet = Fleet(
        Answer(begun(b"a", b"[1]", 1), Part(b"b", (b"[2]", b"[3]"), 3), breaks=True),
        Answer(begun(b"c", b"[4]", 4), breaks=True),
        Answer(begun(b"d", b"[5]", 5)),
    )
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.content) == (200, b"abcd")
    assert [request.told for request in fleet.requests] == [
        (), (b"[1]", b"[2]", b"[3]"), (b"[1]", b"[2]", b"[3]", b"[4]"),
    ]  # fmt: skip
    assert [request.num_sent for request in fleet.requests] == [0, 3, 4]
    assert len({(request.name, request.created_unix, request.body) for request in fleet.requests}) == 1
    assert all(answer.is_over for answer in fleet.answers)


async def test_what_has_not_begun_begins_anew() -> None:
    fleet = Fleet(Answer(breaks=True), Answer(ResponseStart(200, [], Part(b"{}"))))
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert fleet.requests[0] == fleet.requests[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_request_that_ends_each_replica_gets_503(path: str) -> None:
    fleet = Fleet(*(Answer(breaks=True) for _ in range(10)))
    async with fleet.client() as client:
        answer = await client.post(path, json={"prompt": "a"})
    assert answer.status_code == 503
    assert "try again" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert len(fleet.requests) == 1 + MAX_CONTINUATIONS


BREAKING: dict[str, Callable[[], Sequence[Answer]]] = {
    "thrice": lambda: [Answer(begun(b"a", b"[1]", 1), breaks=True)] * 3,
    "without a journal": lambda: [Answer(ResponseStart(200, [], Part(b"a")), breaks=True)],
    "refused": lambda: [
        Answer(begun(b"a", b"[1]", 1), breaks=True),
        *[Answer(ResponseStart(503, [], Part(b"no")))] * 2,
    ],
}


@pytest.mark.parametrize("name", BREAKING)
async def test_an_answer_that_cannot_go_on_breaks_off(name: str) -> None:
    fleet = Fleet(*BREAKING[name]())
    received: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        received.append(message)

    async def receive() -> dict[str, Any]:
        if not received:
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive_once() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await receive() if received else await asyncio.Event().wait() or {}

    proxy = Proxy(Replicas(fleet.forward, (ReplicaError,), 1000))
    with pytest.raises(ReplicaError):
        await proxy(scope, receive_once, send)
    assert [message["type"] for message in received[:2]] == ["http.response.start", "http.response.body"]
    assert all(message.get("more_body", True) for message in received), (
        "the client sees that it is incomplete"
    )
    assert b"no" not in b"".join(message.get("body", b"") for message in received)


async def test_a_client_that_leaves_lets_the_replica_go() -> None:
    class Endless(Answer):
        async def __aiter__(self) -> AsyncIterator[ResponseStart | Part]:
            yield begun(b"a", b"[1]", 1)
            await asyncio.Event().wait()

    fleet, has_begun = Fleet(Endless()), asyncio.Event()
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            has_begun.set()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [],
    }  # fmt: skip
    await asyncio.wait_for(Proxy(Replicas(fleet.forward, (ReplicaError,), 1000))(scope, receive, send), 30)
    assert fleet.answers[0].is_over
