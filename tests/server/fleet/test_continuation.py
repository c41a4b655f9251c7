"""A stream that breaks off anywhere goes on in another server, byte for byte as if it had not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.app import create_app
from headway.server.base.continuation import JOURNAL
from headway.server.fleet.messages import Part
from headway.server.fleet.stream import without_marks
from headway.server.http.continued import HEADER, header_of
from headway.server.text.tokenizer import Tokenizer

KEY, NAME, CREATED = "key", "name", 1_700_000_000
TEMPLATE = "<think></think><tool_call>{{ tools }}"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TEXT = f"<think>Hm, hm.</think>\n\nI look, twice: naïve.\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": FUNCTION}
REQUESTS = {
    "completions": (
        "/v1/completions",
        {"prompt": ["ab", "c"], "n": 2, "max_tokens": 40, "logprobs": 2, "echo": True, "stop": ["twice"]},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [TOOL], "n": 2, "logprobs": True, "stream_options": {"include_usage": True}},
    ),
    "responses": ("/v1/responses", {"input": "hello", "tools": [{"type": "function", **FUNCTION}]}),
    "messages": (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 200, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
}  # fmt: skip


@dataclass
class Told:
    """What an ingress has of a stream. Mutable."""

    body: bytes = b""
    told: list[bytes] = field(default_factory=list)
    num_sent: int = 0

    def add(self, part: Part) -> None:
        self.body += part.body
        self.told += part.told
        self.num_sent = part.num_sent

    def token_ids(self) -> list[list[int]]:
        """By choice."""
        ids: dict[int, list[int]] = {}
        for event in (event for told in self.told for event in json.loads(told)):
            ids.setdefault(event[0], []).extend(event[1])
        return list(ids.values())


@pytest.fixture
def servers(
    tokenizer: Tokenizer,
) -> Callable[[], tuple[FakeEngine, httpx.AsyncClient]]:
    """Makes servers of one model, each with an engine of its own."""

    def make() -> tuple[FakeEngine, httpx.AsyncClient]:
        engine = FakeEngine()
        ids = [*tokenizer.encode_plain(TEXT), tokenizer.stop_token_ids[0]]
        engine.script = lambda request: ids
        services = fake_services(engine, tokenizer, RoleLines(), template=TEMPLATE)
        transport = httpx.ASGITransport(create_app(services, fleet_key=KEY))
        return engine, httpx.AsyncClient(transport=transport, base_url="http://headway")

    return make


async def parts_of(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], told: Told, key: str = KEY
) -> list[Part]:
    content = httpx.Request("POST", "http://x", json={**body, "stream": True}).content
    before = b"[" + b",".join(told.told) + b"]" if told.told else b""
    header = header_of(key, NAME, CREATED, told.num_sent, len(before))
    answer = await client.post(path, content=before + content, headers={HEADER: header})
    assert answer.status_code == 200, answer.text
    assert answer.headers[JOURNAL] == "1"
    return [part async for part in without_marks(as_it_came(answer.content))]


async def as_it_came(content: bytes) -> AsyncIterator[bytes]:
    for piece in re.split(rb"(?<=\n\n)(?=data|event)", content):
        yield piece


def plain(body: bytes) -> dict[bytes, list[bytes]]:
    """The events by choices, of which any may be ahead, without when the answer was over."""
    body = re.sub(rb'"completed_at":\d+', b'"completed_at":0', body)
    events: dict[bytes, list[bytes]] = {}
    for event in body.split(b"\n\n"):
        found = re.search(rb'"choices":\[{(?:"[a-z]+":[^,]*,)*?"index":(\d)', event)
        events.setdefault(b"" if found is None else found[1], []).append(event)
    return events


@pytest.mark.parametrize(("tokens_per_round", "step"), [(1, 7), (4, 1)])
@pytest.mark.parametrize("name", REQUESTS)
async def test_every_cut_is_healed(
    servers: Callable[[], tuple[FakeEngine, httpx.AsyncClient]], name: str, tokens_per_round: int, step: int
) -> None:
    path, body = REQUESTS[name]
    engine, client = servers()
    engine.tokens_per_round = tokens_per_round
    whole = await parts_of(client, path, body, Told())
    wanted = plain(b"".join(part.body for part in whole))
    assert len(whole) > 5
    for cut in range(0, len(whole), step):
        told = Told()
        for part in whole[:cut]:
            told.add(part)
        engine, client = servers()
        engine.tokens_per_round = tokens_per_round
        rest = await parts_of(client, path, body, told)
        assert plain(told.body + b"".join(part.body for part in rest)) == wanted, cut
        given = [submit.output_token_ids for submit in engine.submitted]
        assert all(ids is None or ids in told.token_ids() for ids in given)
        assert cut == 0 or any(given) or not given


async def test_a_stream_is_healed_twice(servers: Callable[[], tuple[FakeEngine, httpx.AsyncClient]]) -> None:
    path, body = REQUESTS["responses"]
    wanted = b"".join(part.body for part in await parts_of(servers()[1], path, body, Told()))
    told = Told()
    for num_parts in (4, 3):
        for part in (await parts_of(servers()[1], path, body, told))[:num_parts]:
            told.add(part)
    rest = await parts_of(servers()[1], path, body, told)
    assert plain(told.body + b"".join(part.body for part in rest)) == plain(wanted)


@pytest.mark.parametrize("header", [header_of("other", NAME, CREATED, 0, 0), "key", ""])
async def test_without_the_key_nothing_is_told(
    servers: Callable[[], tuple[FakeEngine, httpx.AsyncClient]], header: str
) -> None:
    _, client = servers()
    body = {"prompt": "a", "stream": True, "max_tokens": 4}
    answer = await client.post("/v1/completions", json=body, headers={HEADER: header})
    assert answer.status_code == 200
    assert JOURNAL not in answer.headers
    assert ": headway" not in answer.text


async def test_what_is_drawn_follows_from_the_name(
    servers: Callable[[], tuple[FakeEngine, httpx.AsyncClient]],
) -> None:
    """A request without a seed that is sent to two servers gets the same answer, ids and time included."""
    path, body = REQUESTS["chat"]
    body = {name: value for name, value in body.items() if name != "stream_options"}
    answers = []
    for name in (NAME, NAME, "other"):
        engine, client = servers()
        header = header_of(KEY, name, CREATED, 0, 0)
        answer = await client.post(path, json=body, headers={HEADER: header})
        assert answer.status_code == 200, answer.text
        answers.append((answer.content, [submit.sampling.seed for submit in engine.submitted]))
    assert answers[0] == answers[1]
    assert answers[0][1] != answers[2][1]
    assert len(set(re.findall(rb"call_[0-9a-f]{24}", answers[0][0]))) == 4


async def test_a_body_may_come_in_pieces(
    servers: Callable[[], tuple[FakeEngine, httpx.AsyncClient]],
) -> None:
    path, body = REQUESTS["completions"]
    whole = await parts_of(servers()[1], path, body, Told())
    content = httpx.Request("POST", "http://x", json={**body, "stream": True}).content
    before = b"[" + b",".join(part for told in whole[:3] for part in told.told) + b"]"

    async def bytewise() -> Any:
        for byte in before + content:
            yield bytes([byte])
            await asyncio.sleep(0)

    header = header_of(KEY, NAME, CREATED, whole[2].num_sent, len(before))
    answer = await servers()[1].post(path, content=bytewise(), headers={HEADER: header})
    marked = [part async for part in without_marks(as_it_came(answer.content))]
    assert plain(b"".join(part.body for part in [*whole[:3], *marked])) == plain(
        b"".join(p.body for p in whole)
    )
