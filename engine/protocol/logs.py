"""Sets up how both processes log: lines for people, or one JSON object a line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogFormat = Literal["human", "json"]
HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger("headway.start")


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per record; extra={"fields": {...}} become fields of the
    object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Configures the process's logging to stderr unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(HUMAN))
    logging.basicConfig(level=level.upper(), handlers=[handler])


@contextmanager
def log_seconds(what: str) -> Iterator[None]:
    """Logs at debug level how long the block took."""
    began = time.monotonic()
    yield
    logger.debug("%s took %.2f s", what, time.monotonic() - began)


class _Warnings(logging.Handler):
    """Mutable: keeps each warning once, in their order."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self.lines:
            self.lines.append(line)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yields a list that collects the warnings of Headway's modules within the block instead of showing
    them."""
    logger, handler = logging.getLogger("headway"), _Warnings()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
