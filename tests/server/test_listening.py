"""Where the server listens: TLS, a path, and connections whose headers never end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from headway_testing.fake_engine import FakeEngine

from headway.engine import ConfigError
from headway.server import cli
from headway.server.app import create_app
from headway.server.cli.listening import listen, url_of
from headway.server.cli.serve import DrainingServer
from headway.server.config import ServerConfig
from headway.server.guard import MAX_HEADER_BYTES
from headway.server.services import Services


class CalmEngine(FakeEngine):
    def drain(self, seconds: float) -> None:
        self.state = "draining"


@asynccontextmanager
async def serving(services: Services, config: ServerConfig) -> AsyncIterator[str]:
    """Its URL."""
    listener = listen(config)
    server = DrainingServer(create_app(services), config, CalmEngine())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield url_of(listener, config)
    server.should_exit = True
    await running


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
            await asyncio.wait_for(send(writer, 64 * MAX_HEADER_BYTES), 5)
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
