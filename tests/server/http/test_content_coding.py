"""Compressed bodies: decoded within the limit, refused by name where they are broken or of another coding."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from headway.server.app import create_app
from headway.server.base.config import ServiceLimits
from headway.server.requests.services import Services

URL = "/v1/completions"
PLAIN = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
LIMIT = 1 << 20


@pytest.fixture
async def client(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(replace(services, limits=ServiceLimits(max_body_bytes=LIMIT)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        yield client


async def send(client: httpx.AsyncClient, body: bytes, coding: str, size: int = 1 << 16) -> httpx.Response:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return await client.post(URL, content=parts(), headers={"Content-Encoding": coding})


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(PLAIN)),
        ("GZIP", gzip.compress(PLAIN)),
        ("x-gzip", gzip.compress(PLAIN)),
        ("gzip, identity", gzip.compress(PLAIN)),
        ("gzip", gzip.compress(PLAIN[:9]) + gzip.compress(b"") + gzip.compress(PLAIN[9:])),
        ("gzip", gzip.compress(PLAIN[:9]) + bytes(30) + gzip.compress(PLAIN[9:]) + bytes(512)),
        ("deflate", zlib.compress(PLAIN)),
        ("identity", PLAIN),
        ("", PLAIN),
    ],
    ids=["gzip", "upper", "x-gzip", "listed", "members", "padded", "deflate", "identity", "empty"],
)
async def test_a_compressed_body_is_served(
    client: httpx.AsyncClient, coding: str, body: bytes, size: int
) -> None:
    response = await send(client, body, coding, size)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "deflate, gzip", "utf-8"])
async def test_other_codings_are_415_and_the_served_ones_are_named(
    client: httpx.AsyncClient, coding: str
) -> None:
    response = await send(client, PLAIN, coding)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_content_encoding"
    assert response.headers["accept-encoding"] == "gzip, deflate, identity"


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(PLAIN)[:-1]),
        ("gzip", gzip.compress(PLAIN)[:5]),
        ("gzip", gzip.compress(PLAIN)[:-8] + bytes(8)),
        ("gzip", gzip.compress(PLAIN) + b"tail"),
        ("gzip", gzip.compress(PLAIN) + gzip.compress(PLAIN)[:12]),
        ("gzip", PLAIN),
        ("gzip", b""),
        ("deflate", zlib.compress(PLAIN)[:-1]),
        ("deflate", zlib.compress(PLAIN) + b"tail"),
        ("deflate", gzip.compress(PLAIN)),
    ],
    ids=["cut", "cut-head", "wrong-sum", "tail", "cut-member", "plain", "nothing", "cut-zlib", "zlib-tail", "mixed"],
)  # fmt: skip
async def test_a_broken_compressed_body_is_400(client: httpx.AsyncClient, coding: str, body: bytes) -> None:
    response = await send(client, body, coding)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_content_encoding"
    assert "Content-Encoding" in response.json()["error"]["message"]


async def test_a_bomb_is_refused_when_it_passes_the_limit(client: httpx.AsyncClient) -> None:
    bomb = gzip.compress(bytes(100 * LIMIT))
    num_sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for start in range(0, len(bomb), 500):
            num_sent += 500
            yield bomb[start : start + 500]

    response = await client.post(URL, content=parts(), headers={"Content-Encoding": "gzip"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert num_sent < 3000  # a part expands about a thousandfold


@pytest.mark.parametrize("extra", [0, 1])
async def test_the_limit_is_exact_for_decoded_bytes(client: httpx.AsyncClient, extra: int) -> None:
    body = PLAIN.ljust(LIMIT + extra)
    assert (await send(client, gzip.compress(body), "gzip")).status_code == (413 if extra else 200)


async def test_many_small_members_cost_no_square(client: httpx.AsyncClient) -> None:
    body = gzip.compress(b"") * (LIMIT // 20 - 100) + gzip.compress(PLAIN)
    started = time.process_time()
    assert (await send(client, body, "gzip")).status_code == 200
    assert time.process_time() - started < 5


async def test_bytes_behind_the_end_count_for_the_limit(client: httpx.AsyncClient) -> None:
    assert (await send(client, gzip.compress(PLAIN) + bytes(LIMIT), "gzip")).status_code == 413
