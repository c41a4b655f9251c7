"""A replica: one `headway serve`, and the requests that are forwarded to it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import aiohttp
import msgspec
from yarl import URL

from headway.server.base.continuation import JOURNAL
from headway.server.fleet.child_server import ChildServer, Texts
from headway.server.fleet.messages import ForwardedRequest, Part, ReplicaError, ResponseStart, end_to_end
from headway.server.fleet.metrics import RoutedMetrics
from headway.server.fleet.scaling import KV_CACHE_USAGE
from headway.server.fleet.stream import coalesced, seconds_between, without_marks
from headway.server.http.continued import HEADER, header_of

READY_SECONDS = 3600.0  # long enough to download a model of hundreds of gigabytes
HEALTH_SECONDS = 20.0
STATISTICS_SECONDS = 5.0  # for /metrics and /load
# Headers that aiohttp must not add: the client's headers are forwarded as they are.
_ADDED_BY_AIOHTTP = ("accept", "accept-encoding", "content-type", "user-agent")
CONTENT_LENGTH = "content-length"  # the body that is sent has its own: an ingress may have cut it
_ADDED_BY_RAY = (b"date", b"server", b"x-request-id")


class _Load(msgspec.Struct):
    kv_cache_usage_ratio: float


def _leave() -> None:
    os._exit(1)


class Replica:
    """Mutable: the only owner of its server. Ray makes it in a process of its own and calls its methods."""

    def __init__(
        self,
        model: str | None,
        flags: Texts,
        drain_seconds: float,
        read_name: Callable[[], str],
        leave: Callable[[], object] = _leave,
    ) -> None:
        """Returns when the server is ready. read_name: returns Ray's name of this replica. leave: ends
        this process when the server has ended; Ray then starts another replica. Raises ReplicaError."""
        self._name = read_name()
        self._routed = RoutedMetrics()
        self._drain_seconds = drain_seconds
        self._key = secrets.token_hex()
        self._server = ChildServer(model, flags, environment={"HEADWAY_FLEET_KEY": self._key})
        try:
            self._server.wait_until_ready(READY_SECONDS)
        except ReplicaError:
            self._server.end(0.0)
            raise
        self._server.watch(leave)
        self._session: aiohttp.ClientSession | None = None
        self._num_open = 0  # answers

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[ResponseStart | Part, None]:
        """Yields the start of the answer and then the rest of its body. Closing the generator disconnects,
        which ends the request. Raises ReplicaError if the answer breaks off."""
        self._routed.count(request.reason, is_continued=bool(request.told))
        before = b"[" + b",".join(request.told) + b"]" if request.told else b""
        header = header_of(self._key, request.name, request.created_unix, request.num_sent, len(before))
        given = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in end_to_end(request.headers)]
        headers = [pair for pair in given if pair[0].lower() not in (CONTENT_LENGTH, HEADER)]
        try:
            async with self._open_session().request(
                request.method,
                URL(f"http://localhost{request.target}", encoded=True),
                headers=[*headers, (HEADER, header)],
                data=before + request.body or None,
                skip_auto_headers=_ADDED_BY_AIOHTTP,
                allow_redirects=False,
            ) as answer:
                is_journaled = JOURNAL in answer.headers
                left_out = (*_ADDED_BY_RAY, JOURNAL.encode())
                sent = [h for h in end_to_end(answer.raw_headers) if h[0].lower() not in left_out]
                async with aclosing(self._parts(answer.content.iter_any(), is_journaled)) as parts:
                    yield ResponseStart(answer.status, sent, await anext(parts, Part(b"")), is_journaled)
                    async for part in parts:
                        yield part
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ReplicaError(f"the answer of a replica broke off: {error}") from None

    async def check_health(self) -> None:
        """Raises ReplicaError if the server has ended or cannot recover; Ray then replaces the replica."""
        self._server.check()
        await self._get("/health", HEALTH_SECONDS)

    async def metrics(self) -> tuple[str, bytes]:
        """Returns the replica's name and its metrics in Prometheus' text format: the server's and the
        router's counts. Raises ReplicaError."""
        return self._name, await self._get("/metrics", STATISTICS_SECONDS) + self._routed.text()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the values that a scaling policy reads; called by Ray. Raises ReplicaError."""
        load = msgspec.json.decode(await self._get("/load", STATISTICS_SECONDS), type=_Load)
        return {KV_CACHE_USAGE: load.kv_cache_usage_ratio}

    async def __del__(self) -> None:
        """Ends the server. Ray calls it once when the replica is to end and nothing runs any more."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self._server.end, self._drain_seconds)

    async def _get(self, path: str, seconds: float) -> bytes:
        """Returns the body. Raises ReplicaError for any status but 200."""
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._open_session().get(f"http://localhost{path}", timeout=limit) as answer:
                body: bytes = await answer.read()
                if answer.status != 200:
                    raise ReplicaError(f"{path} has status {answer.status}: {body.decode(errors='replace')}")
                return body
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ReplicaError(f"{path} does not answer: {error!r}") from None

    async def _parts(self, pieces: AsyncIterator[bytes], is_journaled: bool) -> AsyncGenerator[Part, None]:
        self._num_open += 1
        try:
            async with aclosing(coalesced(pieces, lambda: seconds_between(self._num_open))) as joined:
                if not is_journaled:
                    async for body in joined:
                        yield Part(body)
                    return
                async with aclosing(without_marks(joined)) as parts:
                    async for part in parts:
                        yield part
        finally:
            self._num_open -= 1

    def _open_session(self) -> aiohttp.ClientSession:
        """Returns the session, which must be made in the event loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._server.path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session
