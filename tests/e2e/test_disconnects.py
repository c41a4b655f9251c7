"""A client that hangs up, at every state of its request: all it held is free after one turn of the engine's
loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.checkpoints import constructed_mimo
from headway_testing.in_process import InProcessEngine
from starlette.types import Message

from headway.engine.protocol.config import EngineConfig
from headway.engine.scheduling.request import Request, Status
from headway.server.app import create_app
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.tokenizer import load_tokenizer

VOCAB, CONTEXT, CHUNK = 600, 256, 32
PROMPT = list(range(1, 2 * CHUNK + 2))  # three chunks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = constructed_mimo(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )
    config = (path / "config.json").read_text()
    tiny_tokenizers.save(path, tiny_tokenizers.byte_level(VOCAB))
    (path / "config.json").write_text(config)
    return path


class Client:
    """One ASGI request that hangs up when told to; what it is sent is thrown away."""

    def __init__(self, services: Services, body: dict[str, object]) -> None:
        self._body = json.dumps(body).encode()
        self._is_asked = False
        self.hangs_up = asyncio.Event()
        self.is_done = False
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": [],
            "root_path": "", "client": None, "server": None, "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(create_app(services)(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.hangs_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.is_done = self.is_done or is_last


@pytest.fixture(params=[False, True], ids=["read-at-once", "one-step-in-flight"])
async def engine(folder: Path, request: pytest.FixtureRequest) -> InProcessEngine:
    config = EngineConfig(
        model_path=str(folder),
        dtype="float32",
        depth=2,
        max_running=2,
        prefill_chunk=CHUNK,
        prefix_caching=False,
    )
    return InProcessEngine(config, reads_late=request.param)


@pytest.fixture
def services(engine: InProcessEngine, folder: Path) -> Services:
    metrics = Metrics(lambda: engine.stats, lambda: 0)
    return Services("tiny", engine, load_tokenizer(folder), metrics)  # type: ignore[arg-type]


async def settle() -> None:
    """Lets the API process do all that it can before the engine moves again."""
    for _ in range(100):
        await asyncio.sleep(0)


def request_of(engine: InProcessEngine, request_id: int) -> Request | None:
    return engine.local.engine.scheduler.state.requests.get(request_id)


def is_queued(request: Request | None) -> bool:
    return request is not None and request.status is Status.WAITING


def is_prefilling(request: Request | None) -> bool:
    return (
        request is not None and request.status is Status.PREFILLING and 0 < request.num_computed < len(PROMPT)
    )


def has_a_first_token(request: Request | None) -> bool:
    return request is not None and 1 <= len(request.output_token_ids) <= 4  # and its first round


def is_in_the_middle(request: Request | None) -> bool:
    return request is not None and 20 <= len(request.output_token_ids) < 40


STATES: dict[str, Callable[[Request | None], bool]] = {
    "queued": is_queued,
    "prefilling": is_prefilling,
    "first token": has_a_first_token,
    "mid-stream": is_in_the_middle,
}


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("state", STATES)
async def test_hanging_up_frees_all_within_a_turn(
    engine: InProcessEngine, services: Services, state: str, stream: bool
) -> None:
    others = []
    if state == "queued":
        # Drawn tokens may be the end of the text.
        body = {"prompt": [7], "max_tokens": 200, "ignore_eos": True}
        others = [Client(services, body) for _ in range(2)]  # all the rows
        await settle()
        engine.step()
    client = Client(
        services, {"prompt": PROMPT, "max_tokens": 60, "stream": stream, "n": 1, "temperature": 0}
    )
    await settle()
    own = len(others)
    for _ in range(60):
        engine.step()
        await settle()
        if STATES[state](request_of(engine, own)):
            break
    assert STATES[state](request_of(engine, own)), "the state was never met"
    client.hangs_up.set()
    await settle()
    assert client.task.done()
    engine.step()
    assert request_of(engine, own) is None
    stats = engine.local.engine.scheduler.snapshot()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (len(others), 0)
    assert stats.finished_by_reason == {"abort": 1}
    assert services.running.num_requests == len(others)
    for other in others:
        other.hangs_up.set()
    await settle()
    engine.step()
    assert engine.local.engine.scheduler.snapshot().num_kv_blocks_used == 0


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_hanging_up_while_the_last_tokens_are_on_their_way_leaves_nothing(
    engine: InProcessEngine, services: Services, stream: bool
) -> None:
    client = Client(services, {"prompt": [7], "max_tokens": 9, "stream": stream, "ignore_eos": True})
    await settle()
    while (
        request_of(engine, 0) is not None or not engine.local.engine.scheduler.snapshot().finished_by_reason
    ):
        engine.step()  # the API process gets no turn
    client.hangs_up.set()
    await settle()
    assert client.task.done()
    for _ in range(2):
        engine.step()
    stats = engine.local.engine.scheduler.snapshot()
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert stats.finished_by_reason == {"length": 1}
    assert services.running.num_requests == 0


@pytest.fixture
async def http(engine: InProcessEngine, services: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(services))
    async with engine.running(), httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        yield client


async def test_who_stays_is_served_as_if_nobody_had_left(
    engine: InProcessEngine, services: Services, http: httpx.AsyncClient
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    leaving = [Client(services, {**body, "prompt": PROMPT[i:], "stream": True}) for i in range(6)]
    staying = asyncio.create_task(http.post("/v1/completions", json=body))
    for client in leaving:
        await asyncio.sleep(0.01)
        client.hangs_up.set()
    assert (await staying).json()["choices"][0]["text"] == alone
    await asyncio.gather(*(client.task for client in leaving))
    while engine.local.engine.scheduler.has_work:
        await asyncio.sleep(0.001)
    assert engine.local.engine.scheduler.snapshot().num_kv_blocks_used == 0
