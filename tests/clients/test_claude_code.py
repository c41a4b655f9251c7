"""Claude Code without a login: a loop of tools, a session that goes on, a picture that a tool returns."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import call_of, said_by
from headway_testing.daemon import Server
from headway_testing.scripted_process import TURN

MODEL = "demo-tools"
# Of one red pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
QUIET = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_TELEMETRY",
    "DISABLE_AUTOUPDATER",
    "DISABLE_ERROR_REPORTING",
)
NAMES = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(scripted_server: Server, node_programs: Path, tmp_path: Path) -> Run:
    """Runs `claude -p` and returns its result."""
    variables = dict.fromkeys(QUIET, "1") | dict.fromkeys(NAMES, MODEL)
    variables |= {
        "ANTHROPIC_BASE_URL": scripted_server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
    }

    def result(script: str, *arguments: str) -> dict[str, Any]:
        flags = ["-p", "--output-format", "json", "--allowedTools", "Bash,Read", *arguments]
        told = said_by([node_programs / "claude", *flags], script, folder=tmp_path, environment=variables)
        found: dict[str, Any] = json.loads(told)
        assert not found["is_error"], found
        return found

    return result


def test_a_loop_of_tools_and_a_session_that_goes_on(run: Run, tmp_path: Path) -> None:
    write = call_of("Bash", command="echo one > a.txt", description="Writes a file")
    read = call_of("Read", file_path=str(tmp_path / "a.txt"))
    found = run(f"<think>\nI write.\n</think>\n\nI write it.\n{write}{TURN}{read}{TURN}It has one line.")
    assert (found["result"], found["num_turns"]) == ("It has one line.", 3)
    assert (tmp_path / "a.txt").read_text() == "one\n"
    assert found["usage"]["output_tokens"] > 0
    goes_on = run("Still one line.", "-c")
    assert (goes_on["result"], goes_on["session_id"]) == ("Still one line.", found["session_id"])


def test_a_picture_that_a_tool_returns_does_not_end_the_session(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(PNG)
    read = call_of("Read", file_path=str(tmp_path / "p.png"))
    assert run(f"{read}{TURN}I read it.")["result"] == "I read it."
    assert run("I go on.", "-c")["result"] == "I go on."
