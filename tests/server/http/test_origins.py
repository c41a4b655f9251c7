"""Which web pages may use a server that no key protects: those of other sites may not, by any trick of
names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine

from headway.server.app import create_app
from headway.server.base.config import ServerConfig
from headway.server.cli.listening import listen, origins_of, url_of
from headway.server.cli.serve import DrainingServer
from headway.server.http.keys import Keys
from headway.server.requests.services import Services

BODY = {"prompt": "abc", "max_tokens": 2}
URL = "/v1/completions"
Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def connect(services: Services) -> Connect:
    """A client of an app that is guarded as `headway serve` would guard it."""

    @asynccontextmanager
    async def connect(config: ServerConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
        config = config or ServerConfig(port=0)
        with closing(listen(config)) as listener:
            origins = origins_of(listener, config)
        app = create_app(services, cors_origins=config.cors_origin, origins=origins)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            yield client

    return connect


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "localhost.:80", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000"]
)  # fmt: skip
async def test_names_of_this_machine_are_served(connect: Connect, host: str) -> None:
    async with connect() as client:
        assert (await client.post(URL, json=BODY, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/dashboard", "/", "/nonsense"])
@pytest.mark.parametrize(
    "host",
    ["attacker.example", "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example:8000",
     "localhost:8000@attacker.example", "attacker.example:8000:localhost", "10.0.0.7", "0.0.0.0:8000", "[::2]", "localhost:x"],
)  # fmt: skip
async def test_another_host_is_refused_everywhere(connect: Connect, host: str, path: str) -> None:
    async with connect() as client:
        response = await client.get(path, headers={"Host": host})
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert host in error["message"]
    assert "--api-key" in error["message"]


async def test_a_second_host_does_not_hide_behind_a_first(connect: Connect) -> None:
    async with connect() as client:
        for hosts in (("localhost", "attacker.example"), ("attacker.example", "localhost")):
            response = await client.get("/version", headers=[("Host", host) for host in hosts])
            assert response.status_code == 403


@pytest.mark.parametrize("name", ["127.0.0.2", "::1", "localhost"])
async def test_the_host_of_the_command_line_is_served(connect: Connect, name: str) -> None:
    async with connect(ServerConfig(host=name, port=0)) as client:
        host = f"[{name}]" if ":" in name else name
        assert (await client.get("/version", headers={"Host": f"{host}:8000"})).status_code == 200
        assert (await client.get("/version", headers={"Host": "attacker.example"})).status_code == 403


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(host="0.0.0.0", port=0),
        ServerConfig(host="::", port=0),
        ServerConfig(port=0, api_key=["k"]),
        ServerConfig(port=0, cors_origin=["*"]),
        ServerConfig(port=0, cors_origin=["https://pages.example"]),
    ],
    ids=["all", "all-6", "keys", "cors-all", "cors-named"],
)
async def test_any_host_is_served_where_it_says_nothing(connect: Connect, config: ServerConfig) -> None:
    async with connect(config) as client:
        assert (await client.get("/version", headers={"Host": "pages.example"})).status_code == 200


async def test_a_unix_socket_serves_any_host_and_origin(connect: Connect, tmp_path: Path) -> None:
    async with connect(ServerConfig(unix_socket=str(tmp_path / "s"))) as client:
        response = await client.post(
            URL, json=BODY, headers={"Host": "api.example", "Origin": "https://api.example"}
        )
    assert response.status_code == 200


FOREIGN = ["https://attacker.example", "http://attacker.example:8000", "null", "http://localhost:3000", "http://127.0.0.1",
           "file://", "chrome-extension://abc", "http://localhost.attacker.example:8000", "http://localhost:8000@attacker.example"]  # fmt: skip


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_pages_of_another_origin_are_refused(
    connect: Connect, engine: FakeEngine, origin: str, host: str
) -> None:
    async with connect(ServerConfig(host=host, port=0)) as client:
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        answers = [
            await client.post(URL, json=BODY, headers=headers),
            await client.post("/tokenize", json={"prompt": "a"}, headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.options(URL, headers={**headers, "Access-Control-Request-Method": "POST"}),
            await client.post("/dashboard", headers=headers),
        ]
    assert {answer.status_code for answer in answers} == {403}
    assert {answer.json()["error"]["code"] for answer in answers} == {"origin_not_allowed"}
    assert "--cors-origin" in answers[0].json()["error"]["message"]
    assert engine.submitted == []


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/dashboard.js", "/favicon.ico"])
async def test_the_page_is_read_from_anywhere(connect: Connect, path: str) -> None:
    async with connect() as client:
        response = await client.get(path, headers={"Origin": "https://attacker.example"})
    assert response.status_code < 400


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
        ("localhost:8443", "https://localhost:8443"),
    ],
)
async def test_the_servers_own_pages_may_ask(connect: Connect, host: str, origin: str) -> None:
    async with connect() as client:
        assert (
            await client.post(URL, json=BODY, headers={"Host": host, "Origin": origin})
        ).status_code == 200


async def test_a_server_for_the_network_takes_its_own_pages_by_any_name(connect: Connect) -> None:
    async with connect(ServerConfig(host="0.0.0.0", port=0)) as client:
        headers = {"Host": "box.lan:8000", "Origin": "http://box.lan:8000"}
        assert (await client.post(URL, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(port=0, cors_origin=["http://localhost:3000"]),
        ServerConfig(port=0, cors_origin=["*"]),
        ServerConfig(port=0, api_key=["k"]),
    ],
    ids=["named", "all", "keys"],
)
async def test_a_named_origin_may_ask(connect: Connect, config: ServerConfig) -> None:
    async with connect(config) as client:
        response = await client.post(URL, json=BODY, headers={"Origin": "http://localhost:3000"})
        assert response.status_code == 200
        assert ("access-control-allow-origin" in response.headers) == bool(config.cors_origin)


async def test_naming_one_origin_lets_no_other_in(connect: Connect) -> None:
    async with connect(ServerConfig(port=0, cors_origin=["http://localhost:3000"])) as client:
        for origin in ("http://localhost:3001", "null"):
            assert (await client.post(URL, json=BODY, headers={"Origin": origin})).status_code == 403


async def test_http_1_0_without_a_host_is_served(services: Services) -> None:
    config = ServerConfig(port=0)
    listener = listen(config)
    app = create_app(services, origins=origins_of(listener, config))

    class CalmEngine(FakeEngine):
        def drain(self, seconds: float) -> None:
            self.state = "draining"

    server = DrainingServer(app, config, CalmEngine())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    assert url_of(listener, config).startswith("http://127.0.0.1:")
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
    writer.write(b"GET /version HTTP/1.0\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    server.should_exit = True
    await running


def test_the_keys_of_the_admin_alone_open_nothing() -> None:
    """An admin key protects what changes the server; generation stays open, and so the check stays."""
    config = ServerConfig(port=0, admin_key="a")
    with closing(listen(config)) as listener:
        assert origins_of(listener, config).hosts is not None
    assert Keys(admin="a").api == ()


def test_a_mapped_loopback_address_is_one() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::ffff:127.0.0.1", 0))
        assert origins_of(listener, ServerConfig()).hosts is not None
