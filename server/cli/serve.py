"""`headway serve`: opens the port, starts the engine, runs uvicorn, and drains on SIGTERM, SIGHUP and
Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from headway.engine import ConfigError, EngineConfig, HeadwayError, read_model_spec
from headway.server.app import create_app
from headway.server.base.config import ModelSource, ServerConfig, ServiceLimits
from headway.server.cli.console import banner, banner_fields, wait_with_progress
from headway.server.cli.http_protocol import BoundedHttpProtocol
from headway.server.cli.hub import model_folder, model_name, with_folders
from headway.server.cli.listening import allow_many_connections, listen, origins_of, remove_path, url_of
from headway.server.cli.redaction import without_credentials
from headway.server.engine.child import EngineChild
from headway.server.engine.client import EngineClient
from headway.server.engine.process import Patience
from headway.server.formats import find_format
from headway.server.grammar.grammars import Grammars
from headway.server.http.keys import Keys
from headway.server.requests.access import RequestRecord
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.chat_template import ChatRenderer, load_chat_template
from headway.server.text.tokenizer import load_tokenizer
from headway.server.text.tokenizer_info import load_tokenizer_info

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
# How long an idle connection stays open: longer than most clients and balancers keep it, so that few send a
# request just as it closes.
KEPT_SECONDS = 75
ECHO_SECONDS = 0.1
GRACE_SECONDS = 5.0  # time to write answers after the engine has ended their requests

logger = logging.getLogger("headway.server")


def serve(
    config: ServerConfig, source: ModelSource, engine_config: EngineConfig, child: EngineChild | None = None
) -> int:
    """Runs until a signal. Every mistake that can be found before the engine is configured is found here.
    child: the engine's process, which imports libraries meanwhile; None starts it last."""
    _check_tls(config)
    allow_many_connections()
    with leaving_on_signals(), closing(listen(config)) as listener, ExitStack() as stack:
        stack.callback(remove_path, listener, config)
        folder = model_folder(source)
        template_file = None if config.chat_template is None else Path(config.chat_template)
        vocab_size = read_model_spec(folder).vocab_size
        tokenizer = load_tokenizer(folder, vocab_size, template_file)
        token_table = tokenizer.token_table()
        template = load_chat_template(folder, template_file)
        engine = EngineClient(
            with_folders(engine_config, folder),
            patience=Patience(serve_seconds=config.engine_timeout),
            token_table=token_table,
            child=child,
            replay=config.replay,
        )
        name, *other_names = config.served_model_name or [model_name(source)]
        source_text = "" if template is None else template.text
        output_format = find_format(source_text, name=config.tool_format)
        metrics = Metrics(
            lambda: engine.stats,
            lambda: engine.status().num_restarts,
            read_state=lambda: engine.status().state,
            read_replays=lambda: engine.num_replays,
            read_draft_check=lambda: "none" if engine.info is None else engine.info.draft_check.state,
            model_name=name,
            names=config.metrics_names,
            tool_format=output_format.name,
        )
        services = Services(
            model_name=name,
            engine=engine,
            tokenizer=tokenizer,
            metrics=metrics,
            grammars=Grammars(token_table, vocab_size, metrics.requests),
            chat=None if template is None else ChatRenderer(template),
            template_source=source_text,
            chat_stop_strings=() if template is None else template.stop_strings,
            chat_note=None if template is None else template.note,
            output_format=output_format,
            limits=_service_limits(config),
            keys=Keys(tuple(config.api_key), config.admin_key),
            other_names=tuple(dict.fromkeys(n for n in other_names if n != name)),
            tokenizer_info=load_tokenizer_info(folder, None if template is None else template.source),
        )
        tracing = _open_tracing(config.otlp_endpoint)
        origins = origins_of(listener, config)
        app = create_app(
            services,
            cors_origins=config.cors_origin,
            trace=tracing,
            origins=origins,
            fleet_key=config.fleet_key,
        )
        server = DrainingServer(app, config, engine)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_run(server, services, config, listener))
        if tracing is not None:
            tracing.close()
    return 0


def _heeded() -> list[signal.Signals]:
    """Returns the signals that end the server. SIGHUP stays ignored under nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not is_nohup]


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Lets signals end the process while no event loop handles them: process 1 of a container would ignore
    SIGTERM otherwise."""
    before = {number: signal.signal(number, _leave) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    """Ends the process. A second signal does not wait for threads that download."""
    for each in _heeded():
        signal.signal(each, lambda number, _: os._exit(128 + number))
    sys.exit(128 + number)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which on a signal also lets the engine finish running requests, up to the drain
    time. A second signal ends everything at once. Mutable as its base: the state of one run."""

    def __init__(self, app: ASGIApp, config: ServerConfig, engine: EngineClient) -> None:
        self._engine = engine
        self._config = config
        self._drain_seconds = config.drain_seconds
        self._sockets: list[socket.socket] = []
        self._captures = False
        self._signalled_seconds = float("-inf")
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
                log_config=None,
                access_log=False,  # requests/access.py logs more
                # At info uvicorn logs its start and end, which the banner and the engine's lines report
                # anyway.
                log_level="warning" if config.log_level == "info" else config.log_level,
                lifespan="off",
                timeout_keep_alive=KEPT_SECONDS,
                timeout_graceful_shutdown=int(config.drain_seconds + GRACE_SECONDS),
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._sockets = sockets or []
        await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain(self._drain_seconds)
        self._remove_paths()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures signals like its base, but the process exits with status 0 instead of raising the
        signal again. May be nested."""
        if self._captures:
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _heeded()}
        for number in before:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        self._captures = True
        try:
            yield
        finally:
            self._captures = False
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain, or ends at once on a second signal. `timeout` and others signal the process and
        then its group: an echo within ECHO_SECONDS is the same signal."""
        now = time.monotonic()
        if self.should_exit and now - self._signalled_seconds < ECHO_SECONDS:
            return
        self._signalled_seconds = now
        if self.should_exit:
            logger.warning("a second signal: ending at once, without waiting for requests")
            self._remove_paths()
            self._engine.kill()
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    def _remove_paths(self) -> None:
        for listener in self._sockets:
            remove_path(listener, self._config)


class Trace(Protocol):
    """The interface of requests/tracing.py, whose packages may be missing."""

    def __call__(self, record: RequestRecord) -> None: ...
    def close(self) -> None: ...


def _open_tracing(endpoint: str | None) -> Trace | None:
    if endpoint is None:
        return None
    try:
        module = importlib.import_module("headway.server.requests.tracing")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint is {without_credentials(endpoint)!r}, it must be left out without OpenTelemetry ({error}); "
            "install it from a clone: .venv/bin/pip install -e '.[otel]'"
        ) from None
    tracing: Trace = module.open_tracing(endpoint)
    return tracing


def _service_limits(config: ServerConfig) -> ServiceLimits:
    return ServiceLimits(
        config.max_body_bytes,
        config.request_timeout,
        config.keep_alive,
        config.force_include_usage,
        refuses_unknown_fields=config.unknown_fields == "refuse",
    )


def _check_tls(config: ServerConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key come together: set both, or neither")
    if config.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # a file that is missing or not in PEM form
        raise ConfigError(
            f"--tls-cert is {config.tls_cert!r}, it must be a certificate in PEM form that fits --tls-key: {error}"
        ) from None


async def _run(
    server: DrainingServer, services: Services, config: ServerConfig, listener: socket.socket
) -> None:
    with server.capture_signals():  # also before and after it serves
        if config.chat_template is not None and services.chat is not None:
            await _check_template(services.chat, config.chat_template)
        await _serve(server, services, config, listener)


async def _serve(
    server: DrainingServer, services: Services, config: ServerConfig, listener: socket.socket
) -> None:
    services.engine.start()
    announcing = asyncio.create_task(_announce(server, services, config, url_of(listener, config)))
    observing = asyncio.create_task(services.metrics.history.run())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        observing.cancel()
        outcomes = await asyncio.gather(announcing, observing, return_exceptions=True)
        await services.engine.close()
        await services.grammars.close()
        if services.chat is not None:
            await services.chat.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _check_template(chat: ChatRenderer, file: str) -> None:
    """Raises ConfigError if no chat could be rendered by the file that the operator named."""
    error = await chat.syntax_error()
    if error is not None:
        await chat.close()
        raise ConfigError(f"--chat-template is {file!r}, it must be a valid Jinja template: {error}")


async def _announce(server: DrainingServer, services: Services, config: ServerConfig, url: str) -> None:
    """Reports that the engine is ready. If it cannot start, the server ends with its error."""
    try:
        if config.log_format == "json":
            await _announce_to_machines(services, url, config.unix_socket)
        else:
            await _announce_to_people(services, url, config.unix_socket)
    except HeadwayError:
        server.should_exit = True
        raise
    await services.grammars.warm_up()
    if services.chat is not None:
        await services.chat.warm_up()
        await services.template_limits.warm_up(services.chat.render)


async def _announce_to_people(services: Services, url: str, unix_socket: str | None) -> None:
    info = await wait_with_progress(services.engine)
    tool_format = services.output_format.name if services.chat is not None else None
    told = banner(
        services.model_name, info, url, unix_socket, tool_format=tool_format, chat_note=services.chat_note
    )
    print(told, flush=True)


async def _announce_to_machines(services: Services, url: str, unix_socket: str | None) -> None:
    """Logs the banner as a JSON object, like everything else in that format."""
    info = await wait_with_progress(services.engine, logger.info)
    fields = banner_fields(services.model_name, info, url, unix_socket)
    fields["tool_format"] = services.output_format.name
    fields["chat_note"] = services.chat_note
    logger.info("serving %s at %s", services.model_name, unix_socket or url, extra={"fields": fields})
