"""The server as `headway serve` runs it, on a real port before a fake engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.server.app import create_app
from headway.server.base.config import ServerConfig
from headway.server.cli.listening import listen, url_of
from headway.server.cli.serve import DrainingServer
from headway.server.requests.services import Services
from headway_testing.fake_engine import FakeEngine


class CalmEngine(FakeEngine):
    def drain(self, seconds: float) -> None:
        self.state = "draining"


@asynccontextmanager
async def serving(
    services: Services, config: ServerConfig, *, send_buffer_bytes: int | None = None
) -> AsyncIterator[str]:
    """Yields its URL. send_buffer_bytes: of each connection; None for what the system gives."""
    listener = listen(config)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    server = DrainingServer(create_app(services), config, CalmEngine())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield url_of(listener, config)
    finally:
        server.should_exit = True
        await running
