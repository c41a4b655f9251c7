"""opencode with the configuration of docs/clients.md: a loop of tools, and a session that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import call_of, said_by
from headway_testing.daemon import Server
from headway_testing.scripted_process import TURN

PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text()
MODEL = "demo-tools"
QUIET = (
    "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD", "OPENCODE_DISABLE_DEFAULT_PLUGINS",
)  # fmt: skip
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(scripted_server: Server, node_programs: Path, tmp_path: Path) -> Run:
    """Runs `opencode run` and returns its events."""
    told = PAGE.split("```json\n")[1].split("```")[0]
    config = json.loads(told.replace("NAME", MODEL).replace("http://localhost:8000", scripted_server.url))
    config |= {"small_model": config["model"], "autoupdate": False, "share": "disabled"}
    (tmp_path / "opencode.json").write_text(json.dumps(config))

    def events(script: str, *arguments: str) -> list[dict[str, Any]]:
        command = [node_programs / "opencode", "run", "--format", "json", *arguments]
        told = said_by(command, script, folder=tmp_path, environment=dict.fromkeys(QUIET, "1"))
        found = [json.loads(line) for line in told.splitlines()]
        assert not [event for event in found if event["type"] == "error"], found
        return found

    return events


def test_a_loop_of_tools_and_a_session_that_goes_on(run: Run, tmp_path: Path) -> None:
    call = call_of("bash", command="echo one > a.txt; cat a.txt", description="Writes a file")
    parts = [event["part"] for event in run(f"I look.\n{call}{TURN}It has one line.") if "part" in event]
    assert [part["text"] for part in parts if part["type"] == "text"] == ["I look.", "It has one line."]
    (tool,) = [part for part in parts if part["type"] == "tool"]
    assert (tool["state"]["status"], tool["state"]["output"]) == ("completed", "one\n")
    assert (tmp_path / "a.txt").read_text() == "one\n"
    texts = [
        event["part"]["text"] for event in run("Still one line.", "--continue") if event["type"] == "text"
    ]
    assert texts == ["Still one line."]
