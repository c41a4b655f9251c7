"""The app on a real port, in the loop of the caller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from headway.server.app import create_app
from headway.server.requests.services import Services


@asynccontextmanager
async def served(services: Services) -> AsyncIterator[str]:
    """Yields its address, http://127.0.0.1:PORT."""
    # With its protocol named asyncio turns Nagle's algorithm off, as for the sockets of `headway serve`.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(services), log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task
