"""What a daemon writes with --log-format json is one object a line, from its first to its last."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing.daemon import KV_CACHE, headway_command

pytestmark = pytest.mark.slow

SECONDS = 90.0


def run_to_the_end(output: Path, *arguments: str) -> None:
    """Serves one completion, refuses one, tells statistics. Both streams of the process go to the file."""
    command = headway_command("serve", "--threads", "1", *KV_CACHE, "--log-format", "json", *arguments)
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = wait_for(output, "url")["url"]
        httpx.post(f"{url}/v1/completions", json={"prompt": "import ", "max_tokens": 8}, timeout=60)
        httpx.post(f"{url}/v1/completions", content=b"{", timeout=60)
        wait_for(output, "tokens_per_second")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def wait_for(output: Path, field: str) -> dict[str, Any]:
    """The first line that has the field."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        lines = [
            json.loads(line) for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        if found := [line for line in lines if field in line]:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"no line has {field}: {output.read_text()}")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("log") / "lines"
    run_to_the_end(output, "--port", "0")
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_line_is_an_object_with_time_level_logger_and_message(lines: list[dict[str, Any]]) -> None:
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert [line for line in lines if line["level"] not in ("info", "debug")] == []


def test_readiness_requests_and_statistics_are_told(lines: list[dict[str, Any]]) -> None:
    (ready,) = [line for line in lines if "num_blocks" in line]
    assert (ready["model"], ready["device"]) == ("headway-demo", "cpu")
    served = [line for line in lines if line["logger"] == "headway.access"]
    assert [line["status"] for line in served] == [200, 400]
    assert served[0]["completion_tokens"] == 8
    statistics = [line for line in lines if "tokens_per_second" in line]
    assert statistics[0]["num_requests_waiting"] == 0
