"""Where the server listens: TLS, a path, and connections whose headers never end."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import trustme
from headway_testing import real_server
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.waiting import until

from headway.engine import ConfigError
from headway.server import cli
from headway.server.base.config import ServerConfig
from headway.server.cli import http_protocol
from headway.server.cli.http_protocol import BoundedHttpProtocol
from headway.server.cli.listening import listen
from headway.server.http.guard import MAX_HEADER_BYTES
from headway.server.requests.services import Services

# Of each connection a little, so that little fills it.
serving = partial(real_server.serving, send_buffer_bytes=1 << 14)


async def test_tls_files_make_it_https(services: Services, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert", append=True)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    config = ServerConfig(port=0, tls_cert=str(tmp_path / "cert"), tls_key=str(tmp_path / "key"))
    async with serving(services, config) as url, httpx.AsyncClient(verify=context) as client:
        assert url.startswith("https://127.0.0.1:")
        assert (await client.post(f"{url}/v1/completions", json={"prompt": "a"})).status_code == 200
        with pytest.raises(httpx.TransportError):
            await client.get(url.replace("https", "http") + "/version")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tls-cert", "/no/such"], "--tls-cert and --tls-key come together"),
        (["--tls-cert", "/no/such", "--tls-key", "/no/such"], "--tls-cert is '/no/such', it must be a certificate"),
    ],
    ids=["half", "missing"],
)  # fmt: skip
def test_tls_files_that_cannot_serve_are_told_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["serve", "--port", "0", *arguments]) == 1
    assert complaint in capsys.readouterr().err


async def test_a_path_is_listened_at_also_after_another_server(services: Services, tmp_path: Path) -> None:
    config = ServerConfig(unix_socket=str(tmp_path / "socket"))
    for _ in range(2):
        async with serving(services, config) as url:
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
            async with httpx.AsyncClient(transport=transport) as client:
                assert (await client.get(f"{url}/ready")).status_code == 200
        assert not (tmp_path / "socket").exists()


def test_a_start_that_fails_leaves_no_path(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    assert cli.main(["serve", "/no/such/model", "--unix-socket", str(path)]) == 1
    assert not path.exists()


async def test_the_path_of_a_live_server_stays_its_own(services: Services, tmp_path: Path) -> None:
    config = ServerConfig(unix_socket=str(tmp_path / "socket"))
    async with serving(services, config) as url:
        with pytest.raises(ConfigError, match="Address already in use; choose another --unix-socket"):
            listen(config)
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.get(f"{url}/ready")).status_code == 200


def test_a_live_server_without_room_for_a_connection_keeps_its_path(tmp_path: Path) -> None:
    """It is not waited for either."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(0)
        waiting.connect(path)
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(ServerConfig(unix_socket=path))
    assert Path(path).is_socket()


def test_a_file_in_the_way_of_a_path_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="choose another --unix-socket"):
        listen(ServerConfig(unix_socket=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


async def test_headers_without_an_end_close_the_connection(services: Services) -> None:
    async with serving(services, ServerConfig(port=0)) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send(writer, 64 * MAX_HEADER_BYTES), 30)
        writer.close()
        del reader


async def send(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    """Bit by bit, so that the server has the time to say no."""
    for _ in range(num_bytes // 4096):
        writer.write(b"x" * 4096)
        await writer.drain()
        await asyncio.sleep(0)


async def test_a_large_body_in_small_parts_keeps_the_connection(services: Services) -> None:
    async with serving(services, ServerConfig(port=0)) as url, httpx.AsyncClient() as client:
        for _ in range(3):
            body = {"prompt": "a", "max_tokens": 2, "user": "x" * (4 * MAX_HEADER_BYTES)}
            assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200


def test_more_descriptors_are_taken_than_the_soft_limit_gives() -> None:
    source = (
        "import resource as r; from headway.server.cli.listening import allow_many_connections;"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, hard));"
        "allow_many_connections(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    command = [sys.executable, "-P", "-c", source]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    soft, hard = map(int, told)
    assert soft == (1 << 16 if hard == -1 else min(hard, 1 << 16))


def test_some_descriptors_are_not_for_connections() -> None:
    source = (
        "import resource as r; from headway.server.cli.listening import connection_limits;"
        "print(*(r.setrlimit(r.RLIMIT_NOFILE, (n, 4096)) or connection_limits() for n in (4096, 100)))"
    )
    command = [sys.executable, "-P", "-c", source]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.strip() == f"({4096 - 128}, {4096 - 96}) (50, 62)"


class TestConnectionsBeyondTheLimit:
    """Two may be open, and one more for as long as it takes to refuse it."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_protocol, "connection_limits", lambda: (2, 3))

    async def test_one_too_many_is_503_and_closed(self, services: Services) -> None:
        async with serving(services, ServerConfig(port=0)) as url:
            kept = [await connect(url) for _ in range(2)]
            reader, writer = await connect(url)
            writer.write(request_of({"prompt": "a"}))
            answer = await asyncio.wait_for(reader.read(), 30)
            head, body = answer.split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in head
            assert msgspec.json.decode(body)["error"]["code"] == "too_many_connections"
            for _, kept_writer in kept:
                kept_writer.write(request_of({"prompt": "a"}))
            for kept_reader, _ in kept:
                assert (await kept_reader.readline()).startswith(b"HTTP/1.1 200")
            for _, any_writer in [*kept, (reader, writer)]:
                any_writer.close()

    async def test_probes_are_answered_and_the_next_finds_room(self, services: Services) -> None:
        async with serving(services, ServerConfig(port=0)) as url, httpx.AsyncClient() as client:
            kept = [await connect(url) for _ in range(2)]
            assert (await client.get(f"{url}/health")).status_code == 200
            assert (await client.get(f"{url}/v1/models")).status_code == 503
            kept[0][1].close()
            async with asyncio.timeout(30):
                while (await client.get(f"{url}/v1/models")).status_code == 503:
                    await asyncio.sleep(0.01)
            kept[1][1].close()

    async def test_many_too_many_are_closed_at_once(self, services: Services) -> None:
        async with serving(services, ServerConfig(port=0)) as url:
            kept = [await connect(url) for _ in range(3)]
            reader, writer = await connect(url)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            for _, any_writer in [*kept, (reader, writer)]:
                any_writer.close()


HALF_A_HEAD = b"GET /version HTTP/1.1\r\nX-Never: "


def test_little_is_buffered_for_a_client_that_does_not_read() -> None:
    """At a port; at a path the system's own bound is small."""
    with listen(ServerConfig(port=0)) as listener, socket.socket(listener.family) as client:
        client.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)
            num_bytes = 0
            with suppress(BlockingIOError):
                while num_bytes < 1 << 24:
                    num_bytes += connection.send(b"x" * 1024)
    assert 1 << 14 < num_bytes < 1 << 19


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
async def test_nothing_is_kept_of_a_connection_that_is_gone(services: Services, resets: bool) -> None:
    async with serving(services, ServerConfig(port=0)) as url:
        client = post(url, {"prompt": "a"})
        assert await asyncio.to_thread(client.recv, 1 << 16)
        (kept,) = map(weakref.ref, protocols())
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await until(lambda: is_collected(kept), 60)


def is_collected(kept: weakref.ref[BoundedHttpProtocol]) -> bool:
    gc.collect()
    return kept() is None


def protocols() -> list[BoundedHttpProtocol]:
    gc.collect()
    return [kept for kept in gc.get_objects() if type(kept) is BoundedHttpProtocol]


class TestClientsThatStall:
    @pytest.fixture(autouse=True)
    def hurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
        monkeypatch.setattr(http_protocol, "STALLED_SECONDS", 0.3)

    @pytest.mark.parametrize(
        ("is_kept", "sent"), [(False, b""), (False, HALF_A_HEAD), (True, HALF_A_HEAD)],
        ids=["none", "half", "half-on-a-kept-connection"],
    )  # fmt: skip
    async def test_headers_that_never_come_end_the_connection(
        self, services: Services, is_kept: bool, sent: bytes
    ) -> None:
        async with serving(services, ServerConfig(port=0)) as url:
            reader, writer = await connect(url)
            if is_kept:
                writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" in await reader.readuntil(b"\r\n")
                await asyncio.sleep(0.05)
            writer.write(sent)
            async with asyncio.timeout(30):
                with suppress(ConnectionResetError):
                    await reader.read()
            writer.close()

    async def test_a_reader_that_stops_is_given_up_and_holds_nobody_up(
        self, services: Services, engine: FakeEngine
    ) -> None:
        """Its events go on until its buffers are full; the stream beside it does not notice."""
        many_tokens(engine)
        stalled = {"prompt": "a", "max_tokens": 10_000_000, "stream": True}
        async with serving(services, ServerConfig(port=0)) as url, httpx.AsyncClient() as client:
            silent = [post(url, stalled) for _ in range(4)]
            await until(lambda: len(engine.running) == 4)
            body = {"prompt": "a", "max_tokens": 60_000, "stream": True}
            answer = await client.post(f"{url}/v1/completions", json=body, timeout=20)
            assert answer.text.endswith("data: [DONE]\n\n")
            await until(lambda: not engine.running, seconds=20)
            assert sorted(engine.aborted) == [0, 1, 2, 3]
            assert (await client.get(f"{url}/load")).json()["num_requests"] == 0
            for client_socket in silent:
                client_socket.close()

    async def test_a_slow_reader_gets_all(self, services: Services, engine: FakeEngine) -> None:
        """Slower than the limit in all, but never so long without a read."""
        many_tokens(engine)
        num_tokens = 300_000
        async with serving(services, ServerConfig(port=0)) as url:
            reader, writer = await connect(url)
            writer.write(request_of({"prompt": "a", "max_tokens": num_tokens, "stream": True}))
            data = bytearray()
            while not data.endswith(b"0\r\n\r\n"):
                data += await reader.read(1 << 15)
                await asyncio.sleep(0.05)
            writer.close()
        assert data.count(b"H") >= num_tokens


def many_tokens(engine: FakeEngine) -> None:
    """3,000 each hundredth of a second, without an end to the context."""
    engine.script = lambda request: [40] * request.max_tokens
    engine.info = msgspec.structs.replace(INFO, max_model_len=1 << 30)
    engine.tokens_per_round, engine.round_seconds = 3_000, 0.01


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port, limit=1 << 16)


def request_of(body: dict[str, object]) -> bytes:
    content = msgspec.json.encode(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def post(url: str, body: dict[str, object]) -> socket.socket:
    """A client that sends and never reads."""
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(request_of(body))
    return client
