"""`headway serve`: binds the port, starts the engine, runs uvicorn, drains on SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import uvicorn
from fastapi import FastAPI

from headway.engine import ConfigError, EngineConfig, HeadwayError, read_model_config
from headway.server.app import create_app
from headway.server.chat_template import ChatRenderer, load_chat_template
from headway.server.cli.console import banner, wait_with_progress
from headway.server.config import ModelSource, ServerConfig
from headway.server.engine_client import EngineClient
from headway.server.hub import model_folder, model_name
from headway.server.metrics import Metrics
from headway.server.services import Services
from headway.server.tokenizer import load_tokenizer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 5.0  # for answers to be written after the engine has ended their requests

logger = logging.getLogger("headway.server")


def serve(config: ServerConfig, source: ModelSource, engine_config: EngineConfig) -> int:
    """Runs until a signal. What can be found wrong before the engine starts is found here."""
    with closing(_listen(config.host, config.port)) as listener:
        folder = model_folder(source)
        read_model_config(folder)
        tokenizer = load_tokenizer(folder)
        template = load_chat_template(folder)
        engine = EngineClient(msgspec.structs.replace(engine_config, model_path=str(folder)))
        services = Services(
            model_name=config.served_model_name or model_name(source),
            engine=engine,
            tokenizer=tokenizer,
            metrics=Metrics(lambda: engine.stats, lambda: engine.status().num_restarts),
            chat=None if template is None else ChatRenderer(template),
        )
        server = DrainingServer(create_app(services), config, engine)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_run(server, services, listener))
    return 0


class DrainingServer(uvicorn.Server):
    """uvicorn, which on a signal also lets the engine finish what runs, up to the drain time.

    Mutable as its base: the state of one run.
    """

    def __init__(self, app: FastAPI, config: ServerConfig, engine: EngineClient) -> None:
        self._engine = engine
        self._drain_seconds = config.drain_seconds
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level=config.log_level,
                lifespan="off",
                timeout_graceful_shutdown=int(config.drain_seconds + GRACE_SECONDS),
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain(self._drain_seconds)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As its base does, but the process leaves with status 0 instead of dying by the signal again."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


async def _run(server: DrainingServer, services: Services, listener: socket.socket) -> None:
    services.engine.start()
    announcing = asyncio.create_task(_announce(server, services, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        (outcome,) = await asyncio.gather(announcing, return_exceptions=True)
        await services.engine.close()
        if services.chat is not None:
            await services.chat.close()
    if isinstance(outcome, Exception):
        raise outcome


async def _announce(server: DrainingServer, services: Services, listener: socket.socket) -> None:
    """The banner, once the engine is ready. If it cannot start, the server leaves with its error."""
    try:
        info = await wait_with_progress(services.engine)
    except HeadwayError:
        server.should_exit = True
        raise
    print(banner(services.model_name, info, _url(listener)), flush=True)
    if services.chat is not None:
        await services.chat.warm_up()


def _listen(host: str, port: int) -> socket.socket:
    """Before anything is loaded: a port in use is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, it must be an address of this machine: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port or --host"
        ) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
