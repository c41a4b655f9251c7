"""What HTTP leaves to the server: upgrades that are not taken, framing by version, pipelines, the end of a
connection."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import trustme
from headway_testing.fake_engine import FakeEngine
from headway_testing.real_server import CalmEngine, serving
from headway_testing.waiting import until

from headway.server import cli
from headway.server.app import create_app
from headway.server.base.config import ServerConfig
from headway.server.cli import http_protocol
from headway.server.cli.http_protocol import BoundedHttpProtocol
from headway.server.cli.listening import listen
from headway.server.cli.serve import DrainingServer
from headway.server.requests import body as body_module
from headway.server.requests.services import Services

BODY = b'{"prompt":"abc def","max_tokens":3}'
STREAM = b'{"prompt":"abc def","max_tokens":3,"stream":true}'
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "unknown": b"Connection: keep-alive, Upgrade\r\nUpgrade: foo/2, bar\r\n",
    "two-lines": b"Connection: Upgrade\r\nConnection: HTTP2-Settings\r\nUpgrade: h2c\r\n",
    "tls": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
}
PLAIN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def url(services: Services) -> AsyncIterator[str]:
    async with serving(services, ServerConfig(port=0)) as url:
        yield url


def post(offer: bytes = b"", body: bytes = BODY, version: bytes = b"1.1", *, chunked: bool = False) -> bytes:
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\n%s" % (version, offer)
    if chunked:
        parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of an answer that has a Content-Length."""
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        return head, await reader.readexactly(int(length.split(b":")[1]))


def num_tokens(body: bytes) -> int:
    return int(msgspec.json.decode(body)["usage"]["completion_tokens"])


@pytest.mark.parametrize("step", [0, 1, 50], ids=["at-once", "byte-by-byte", "in-parts"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offered_upgrade_is_ignored_and_the_connection_goes_on(
    url: str, offer: bytes, chunked: bool, step: int
) -> None:
    reader, writer = await connect(url)
    request = post(offer, chunked=chunked)
    for start in range(0, len(request), step or len(request)):
        writer.write(request[start : start + (step or len(request))])
        await asyncio.sleep(0 if step else 0.01)
    head, body = await answer(reader)
    assert (head[:12], num_tokens(body)) == (b"http/1.1 200", 3)
    for again in (PLAIN, request):
        writer.write(again)
        assert (await answer(reader))[0].startswith(b"http/1.1 200")
    writer.close()


async def test_pipelined_requests_with_and_without_an_offer_are_all_answered(url: str) -> None:
    reader, writer = await connect(url)
    offer = OFFERS["h2c"]
    bare = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    writer.write(post(offer) + bare + post(offer, chunked=True) + PLAIN + bare + post())
    bodies = [(await answer(reader))[1] for _ in range(6)]
    assert [b"completion_tokens" in body for body in bodies] == [True, False, True, False, False, True]
    writer.close()


async def test_a_body_with_an_offer_is_asked_for(url: str) -> None:
    reader, writer = await connect(url)
    head, _, body = post(OFFERS["h2c"] + b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert b"100 Continue" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    writer.write(body)
    assert num_tokens((await answer(reader))[1]) == 3
    writer.close()


async def test_connect_is_refused_and_the_connection_ends(url: str) -> None:
    reader, writer = await connect(url)
    writer.write(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(url: str) -> None:
    for offer in (b"", b"Connection: keep-alive\r\n", OFFERS["h2c"]):
        reader, writer = await connect(url)
        writer.write(post(offer, STREAM, b"1.0"))
        head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_http_1_0_keeps_a_connection_only_if_asked(url: str) -> None:
    reader, writer = await connect(url)
    for _ in range(2):
        writer.write(post(b"Connection: Keep-Alive\r\n", version=b"1.0"))
        head, body = await answer(reader)
        assert b"\r\nconnection: keep-alive\r\n" in head
        assert num_tokens(body) == 3
    writer.write(post(version=b"1.0"))
    head, _ = await answer(reader)
    assert b"\r\nconnection: close\r\n" in head
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


@pytest.mark.parametrize("protocol", ["--http2", "--http1.0", "--http1.1"])
async def test_curl_completes_and_streams_by_any_protocol(url: str, protocol: str) -> None:
    for body in (BODY, STREAM):
        command = ["curl", "-sSN", "--max-time", "10", protocol, "-d", body.decode(), f"{url}/v1/completions"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        text, _ = await process.communicate()
        assert process.returncode == 0
        assert text.endswith(b"data: [DONE]\n\n") if body == STREAM else num_tokens(text) == 3, text


def certified(folder: Path) -> tuple[ServerConfig, ssl.SSLContext]:
    """A server's configuration with TLS, and what its clients trust."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(folder / "cert", append=True)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return ServerConfig(port=0, tls_cert=str(folder / "cert"), tls_key=str(folder / "key")), context


async def test_an_idle_tls_connection_does_not_hold_the_end_up(services: Services, tmp_path: Path) -> None:
    config, context = certified(tmp_path)
    listener = listen(config)
    server = DrainingServer(create_app(services), config, CalmEngine())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    idle = await asyncio.to_thread(_kept_tls, listener.getsockname(), context)
    started = time.monotonic()
    server.should_exit = True
    await running
    assert time.monotonic() - started < 3
    idle.close()


def _kept_tls(address: tuple[str, int], context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection that has had an answer and then neither reads nor writes."""
    client = context.wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1")
    client.sendall(PLAIN)
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.parametrize(
    "arguments", [("--max-body", "0"), ("--cors-origin", "notaurl"), ("--cors-origin", "http://a/b")]
)
def test_options_that_cannot_serve_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    assert cli.main(["serve", "--port", "0", *arguments]) == 1
    assert f"{arguments[0]} is {arguments[1]!r}, it must be" in capsys.readouterr().err


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
async def test_a_client_that_leaves_at_any_moment_makes_no_traceback(
    url: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture, resets: bool
) -> None:
    engine.round_seconds = 0.002
    whole = [
        post(),
        post(body=STREAM),
        post(OFFERS["h2c"], chunked=True),
        post() + post(body=STREAM),
        post() * 3,
    ]
    for request in whole:
        for cut in (10, 60, len(request) // 2, len(request) - 1, len(request)):
            for delay in (0.0, 0.001, 0.004):
                await asyncio.to_thread(_leave, url, request[:cut], delay, resets)
    await until(lambda: not engine.running)
    await asyncio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def _leave(url: str, request: bytes, delay: float, resets: bool) -> None:
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(request)
    time.sleep(delay)
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_the_end_of_the_server_makes_no_traceback(
    services: Services, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    is_tls: bool, leaves: bool,
) -> None:  # fmt: skip
    """Neither of a request whose body never comes, nor of a connection that is lost while it is being
    closed."""
    monkeypatch.setattr(http_protocol, "CLOSE_SECONDS", 0.2)
    config, context = certified(tmp_path) if is_tls else (ServerConfig(port=0), None)
    listener = listen(config)
    server = DrainingServer(create_app(services), config, CalmEngine())
    server.config.timeout_graceful_shutdown = 1
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    connections = [await asyncio.open_connection(host, port, ssl=context) for _ in range(3)]
    for reader, writer in connections[:2]:
        writer.write(PLAIN)
        await answer(reader)
    connections[2][1].write(post()[:-5])
    await asyncio.sleep(0.1)
    server.should_exit = True
    if leaves:
        await asyncio.sleep(0.15)
        connections[0][1].transport.abort()
        connections[1][1].close()
    await running
    await asyncio.sleep(0.4)  # timers that are left over fire
    for _, writer in connections:
        writer.transport.abort()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert "POST '/v1/completions' was not complete when the server ended" in caplog.messages


EARLY = {
    "slow": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n ", b"408"),
    "too-large": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n ", b"413"),
    "no-such-path": (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n ", b"404"),
    "wrong-method": (b"PUT /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n \r\n", b"405"),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "status"), EARLY.values(), ids=EARLY)
async def test_a_connection_whose_body_is_not_sent_by_its_answer_is_closed_though_bytes_keep_coming(
    url: str, monkeypatch: pytest.MonkeyPatch, request_: bytes, status: bytes
) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.5)
    reader, writer = await connect(url)
    writer.write(request_)
    head, _ = await answer(reader)
    assert head.split()[1] == status
    assert (b"\r\nconnection: close" in head) == (status in (b"408", b"413"))
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(drip(writer), 30)
    writer.transport.abort()


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def test_a_client_that_sends_all_of_a_body_that_is_too_large_gets_the_answer(url: str) -> None:
    """Closing at once would reset the connection, and the answer would be lost with it."""
    reader, writer = await connect(url)
    size = 64 * 2**20
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    for _ in range(8):
        writer.write(b" " * 2**20)
        await writer.drain()
    assert (await answer(reader))[0].startswith(b"http/1.1 413")
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_refused_body_that_comes_soon_keeps_the_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.3)
    reader, writer = await connect(url)
    writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    assert (await answer(reader))[0].startswith(b"http/1.1 404")
    writer.write(b" " * 9)
    await asyncio.sleep(0.5)
    writer.write(PLAIN)
    assert (await answer(reader))[0].startswith(b"http/1.1 200")
    writer.close()


@pytest.mark.parametrize(
    ("request_", "num_answers"), [(post(), 1), (post(body=STREAM), 1), (PLAIN, 1), (post() + PLAIN + post(), 3),
                                  (post(version=b"1.0"), 1)],
    ids=["at-once", "stream", "get", "pipelined", "http-1.0"],
)  # fmt: skip
async def test_a_client_that_sends_no_more_gets_its_answers_and_then_the_end(
    url: str, engine: FakeEngine, request_: bytes, num_answers: int
) -> None:
    engine.round_seconds = 0.05
    reader, writer = await connect(url)
    writer.write(request_)
    writer.write_eof()
    text = await asyncio.wait_for(reader.read(), 30)
    assert text.count(b" 200 OK\r\n") == num_answers
    assert text.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_client_that_sends_no_more_and_waits_is_told_now_and_then_that_its_request_goes_on(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interim answer is what tells it from a client that has left."""
    monkeypatch.setattr(http_protocol, "PROBE_SECONDS", 0.1)
    engine.round_seconds = 0.2
    reader, writer = await connect(url)
    writer.write(post())
    writer.write_eof()
    text = await asyncio.wait_for(reader.read(), 30)
    assert text.startswith(b"HTTP/1.1 102 Processing\r\n\r\n")
    assert text.count(b"HTTP/1.1 200 OK\r\n") == 1
    writer.close()


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["at-once", "stream"])
async def test_a_client_that_left_after_its_request_ends_it(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "PROBE_SECONDS", 0.1)
    engine.stall_after = 0 if body is BODY else None
    engine.script = lambda request: [40] * 10_000
    engine.round_seconds = 0.2
    _, writer = await connect(url)
    writer.write(post(body=body.replace(b'max_tokens":3', b'max_tokens":50')))
    await until(lambda: len(engine.running) == 1)
    writer.close()
    await until(lambda: not engine.running)


async def test_half_a_request_and_no_more_ends_the_connection(url: str) -> None:
    for request in (post()[:-3], post()[:30]):
        reader, writer = await connect(url)
        writer.write(request)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_connection_has_one_probe_at_a_time() -> None:
    """Each pipelined request begins one anew; the end of the connection stops the last."""
    protocol = BoundedHttpProtocol.__new__(BoundedHttpProtocol)
    protocol.loop = asyncio.get_running_loop()
    protocol._await_probe(60)
    first = protocol._probe_timer
    protocol._await_probe(60)
    assert first is not None
    assert first.cancelled()
    assert protocol._probe_timer is not None
    protocol._probe_timer.cancel()
