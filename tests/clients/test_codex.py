"""Codex CLI with the configuration of docs/clients.md: plain, its tools of every type, an MCP server, a
schema, a session that goes on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import call_of, said_by
from headway_testing.daemon import Server
from headway_testing.scripted_process import TURN

PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text()
MODEL = "demo-tools"
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(scripted_server: Server, node_programs: Path, tmp_path: Path) -> Run:
    """Runs `codex exec` and returns its events, without notes of its start."""
    lines = PAGE.split("```toml\n")[1].split("```")[0].splitlines()
    told = "\n".join(line.strip() for line in lines)
    config = told.replace('"NAME"', f'"{MODEL}"').replace("http://localhost:8000", scripted_server.url)
    assert config.count(MODEL) == config.count(scripted_server.url) == 1
    server = [str(Path(__file__).with_name("mcp_server.py"))]
    mcp = f"[mcp_servers.demo]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(server)}\n"
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(f"{config}\n{mcp}")

    def events(script: str, *arguments: str) -> list[dict[str, Any]]:
        first, *others = arguments or ("",)
        flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *others]
        command = [node_programs / "codex", "exec", *first.split(), *flags, "-"]
        told = said_by(command, script, folder=tmp_path, environment={})
        return [json.loads(line) for line in told.splitlines()]

    return events


def items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that were completed, but for the note that the model is not in Codex's catalogue."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    assert events[-1]["type"] == "turn.completed", events[-1]
    return [item for item in done if not re.match("Model metadata for", item.get("message", ""))]


def spoken(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(item["type"], item["text"]) for item in found if "text" in item]


def test_an_answer_and_its_usage(run: Run) -> None:
    events = run("<think>\nThey greet.\n</think>\n\nHello there.")
    assert spoken(items(events)) == [("reasoning", "They greet."), ("agent_message", "Hello there.")]
    assert events[-1]["usage"]["output_tokens"] > events[-1]["usage"]["reasoning_output_tokens"] > 0


def test_a_command_and_a_session_that_goes_on(run: Run, tmp_path: Path) -> None:
    call = call_of("exec_command", cmd="echo one > a.txt; cat a.txt")
    found = items(run(f"<think>\nI list.\n</think>\n\nI look.\n{call}{TURN}It has one line."))
    kinds = ["reasoning", "agent_message", "command_execution", "agent_message"]
    assert [item["type"] for item in found] == kinds
    assert (found[2]["exit_code"], found[2]["aggregated_output"].splitlines()[-1]) == (0, "one")
    assert (tmp_path / "a.txt").read_text() == "one\n"
    assert spoken(items(run("Still one line.", "resume --last"))) == [("agent_message", "Still one line.")]


def test_a_tool_of_an_mcp_server(run: Run) -> None:
    found = items(run(f"{call_of('mcp__demo__add', a=20, b=22)}{TURN}It is 42."))
    assert [item["type"] for item in found] == ["mcp_tool_call", "agent_message"]
    assert found[0]["result"]["content"] == [{"type": "text", "text": "42"}]
    assert (found[0]["server"], found[0]["tool"], found[0]["error"]) == ("demo", "add", None)


def test_an_answer_by_a_schema(run: Run, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    found = items(run('{"n": 7}', "", "--output-schema", "schema.json"))
    assert spoken(found) == [("agent_message", '{"n": 7}')]


def test_agents_talk_to_each_other(run: Run) -> None:
    """Their messages are items of a type of their own, with a payload that Codex takes for encrypted."""
    spawn = call_of("collaboration__spawn_agent", task_name="kid", message="Say hi.", fork_turns="none")
    wait = call_of("collaboration__wait_agent", timeout_ms=10000)
    found = items(run(f"{spawn}{TURN}{wait}{TURN}End.", "", "--enable", "multi_agent_v2"))
    assert found[-1]["type"] == "agent_message"
    assert "Sender: /root/kid" in found[-1]["text"]
    assert "Say hi." in found[-1]["text"]


@pytest.fixture
def catalogue(node_programs: Path, tmp_path: Path) -> Callable[..., str]:
    """Returns the option of a catalogue in which the served model has the features of one that Codex
    knows."""
    told = said_by(
        [node_programs / "codex", "debug", "models", "--bundled"], "", folder=tmp_path, environment={}
    )
    models = {model["slug"]: model for model in json.loads(told)["models"]}

    def option(slug: str, **changed: Any) -> str:
        model = {**models[slug], "slug": MODEL, **changed}
        (tmp_path / "models.json").write_text(json.dumps({"models": [model]}))
        return f"model_catalog_json={json.dumps(str(tmp_path / 'models.json'))}"

    return option


def test_a_custom_tool_and_a_search_for_tools(
    run: Run, catalogue: Callable[..., str], tmp_path: Path
) -> None:
    option = catalogue("gpt-5.5")
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hi\n*** End Patch"
    found = items(run(f"{call_of('apply_patch', input=patch)}{TURN}Patched.", "", "-c", option))
    assert [item["type"] for item in found] == ["file_change", "agent_message"]
    assert (tmp_path / "new.txt").read_text() == "hi\n"
    script = f"{call_of('tool_search', query='add')}{TURN}{call_of('mcp__demo__add', a=20, b=22)}{TURN}Found."
    found = items(run(script, "", "-c", option))
    assert [item["type"] for item in found] == ["mcp_tool_call", "agent_message"]
    assert found[0]["result"]["content"] == [{"type": "text", "text": "42"}]


def test_tools_among_the_items_of_the_conversation(run: Run, catalogue: Callable[..., str]) -> None:
    """As Codex sends them for its newest models, whose one tool runs a program that calls the others."""
    code = "text(await tools.mcp__demo__add({a: 20, b: 22}))"
    found = items(run(f"{call_of('exec', input=code)}{TURN}Ran.", "", "-c", catalogue("gpt-5.6-luna")))
    assert [item["type"] for item in found] == ["mcp_tool_call", "agent_message"]
