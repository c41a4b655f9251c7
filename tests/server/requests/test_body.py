"""Bodies that are being received: bounded over all connections."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from typing import Self
from urllib.parse import urlsplit

import httpx
import pytest
from headway_testing.real_server import serving
from headway_testing.waiting import until

from headway.server.base.config import ServerConfig, ServiceLimits
from headway.server.http import unread_bodies
from headway.server.http.unread_bodies import UnreadBodies
from headway.server.requests import body as module
from headway.server.requests.services import Services

MIB = 2**20


@pytest.fixture
def services(services: Services) -> Services:
    bodies = UnreadBodies(max_bytes=4 * MIB)
    return Services("tiny", services.engine, services.tokenizer, services.metrics, unread_bodies=bodies)


class Waiting:
    """A connection that announces a body, sends all but one byte of it, and waits."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._address = urlsplit(address)
        self._num_bytes = num_bytes

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {self._num_bytes + 1}\r\n\r\n"
        self.writer.write(head.encode() + b" " * self._num_bytes)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.writer.drain(), 0.5)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def status(self) -> int:
        line = await asyncio.wait_for(self.reader.readline(), 20)
        return int(line.split()[1])


async def test_a_body_beyond_the_bound_is_refused_and_small_ones_pass(address: str) -> None:
    async with Waiting(address, 2 * MIB - 1000), Waiting(address, 2 * MIB - 1000):
        await asyncio.sleep(0.3)
        async with Waiting(address, 3 * MIB) as third, httpx.AsyncClient() as client:
            small = await client.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert small.status_code == 200
            assert await third.status() == 503


async def test_a_length_may_have_any_number_of_leading_zeros(address: str) -> None:
    content = b'{"prompt": "a", "max_tokens": 1}'
    length = "0" * 5000 + str(len(content))
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + content
    )
    await asyncio.to_thread(_send, address, request, 200)


async def test_bodies_whose_client_waits_give_way(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_bodies, "STALLED_SECONDS", 0.2)
    async with Waiting(address, 2 * MIB) as first, Waiting(address, 2 * MIB), httpx.AsyncClient() as client:
        await asyncio.sleep(0.6)
        body = {"prompt": "the quick brown fox " * 100_000, "truncate_prompt_tokens": 9, "max_tokens": 1}
        assert (await client.post(f"{address}/v1/completions", json=body)).status_code == 200
        assert await first.status() == 408


async def test_room_comes_back(address: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1' + b" " * (3 * MIB) + b"}"
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(3):
            assert (await client.post(f"{address}/v1/completions", content=body)).status_code == 200


ENDS = {
    "too-slow": (2 * MIB, b" " * (2 * MIB - 1), 408),
    "leaves": (2 * MIB, b" " * (2 * MIB - 1), None),
    "no-json": (2 * MIB, b" " * (2 * MIB), 400),
    "too-large": (None, b"200000\r\n" + b" " * 0x200000 + b"\r\n" + b"80000000\r\n", 413),
    "wrong-type": (2 * MIB, b'{"prompt":7,"x":"' + b" " * (2 * MIB - 19) + b'"}', 400),
}


@pytest.mark.parametrize(("length", "body", "status"), ENDS.values(), ids=ENDS)
async def test_a_body_that_comes_to_nothing_is_not_kept_until_the_collector_runs(
    services: Services, monkeypatch: pytest.MonkeyPatch, length: int | None, body: bytes, status: int | None
) -> None:
    """An error, its traceback and the request's frames refer to each other."""
    monkeypatch.setattr(module, "BODY_SECONDS", 0.5)
    limited = replace(services, limits=ServiceLimits(max_body_bytes=3 * MIB), unread_bodies=UnreadBodies())
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode() + body
    if status == 413:
        request += b" " * (2 * MIB)
    async with serving(limited, ServerConfig(port=0)) as url:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                await asyncio.to_thread(_send, url, request, status)
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < MIB)
        finally:
            tracemalloc.stop()
            gc.enable()


def _send(url: str, request: bytes, status: int | None) -> None:
    """status: of the answer that is waited for; None for a client that leaves."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(request)
        if status is None:
            time.sleep(0.1)
        else:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status)
