"""A line of JSON holds what the call says, its fields and its exception."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

from headway.engine.protocol.logs import JsonFormatter


def formatted(**attributes: object) -> dict[str, object]:
    record = logging.LogRecord("headway.x", logging.WARNING, __file__, 1, "%d \n of %s", (3, "ü"), None)
    record.__dict__.update(attributes)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_of_json_has_time_level_logger_and_message() -> None:
    line = formatted()
    assert datetime.fromisoformat(str(line.pop("time"))).tzinfo is not None
    assert line == {"level": "warning", "logger": "headway.x", "message": "3 \n of ü"}


def test_fields_are_fields_of_the_object() -> None:
    assert formatted(fields={"status": 200, "seconds": 0.5, "error": None}).items() >= {
        ("status", 200), ("seconds", 0.5), ("error", None)}  # fmt: skip


def test_an_exception_is_told_with_its_traceback() -> None:
    try:
        raise ValueError("of this test")
    except ValueError:
        told = str(formatted(exc_info=sys.exc_info())["exception"])
    assert told.startswith("Traceback")
    assert told.endswith("ValueError: of this test")


def test_a_process_logs_to_stderr_in_the_format_that_was_asked_for() -> None:
    code = (
        "import logging; from headway.engine.protocol.logs import configure_logging as c; c('warning', '{}');"
        "logging.getLogger('a').info('unseen'); logging.getLogger('a').error('seen')"
    )
    for log_format in ("human", "json"):
        command = [sys.executable, "-P", "-c", code.format(log_format)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (line,) = done.stderr.splitlines()
        assert line.endswith("ERROR a: seen") == (log_format == "human")
        assert line.endswith('"message":"seen"}') == (log_format == "json")
