"""The command `llm`: a prompt, a schema and a tool, from its command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from headway_testing.daemon import Server
from headway_testing.scripted_process import TURN

CALL = '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}  # fmt: skip
Command = Callable[..., str]


@pytest.fixture
def llm(environment: Path, tmp_path: Path) -> Command:
    """Runs the command before a server, with settings of its own."""

    def run(server: Server, *arguments: str) -> str:
        model = {
            "model_id": "demo", "model_name": "demo-tools", "api_base": f"{server.url}/v1",
            "supports_schema": True, "supports_tools": True,
        }  # fmt: skip
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
        command = [
            environment / "llm",
            "-m",
            "demo",
            "-o",
            "seed",
            "3",
            "-o",
            "max_tokens",
            "200",
            *arguments,
        ]
        environ = os.environ | {"LLM_USER_PATH": str(tmp_path), "PYTHONPATH": "", "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_prompt_is_answered_and_continued(llm: Command, scripted_server: Server) -> None:
    assert llm(scripted_server, "Hello there.").strip() == "Hello there."
    assert llm(scripted_server, "-c", "And again.").strip() == "And again."


@pytest.mark.parametrize("flags", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_a_schema_is_kept(llm: Command, tools_server: Server, flags: tuple[str, ...]) -> None:
    answer = json.loads(llm(tools_server, *flags, "--schema", json.dumps(SCHEMA), "import os"))
    assert answer["color"] in ("red", "green")
    assert 0 <= answer["count"] <= 99


@pytest.mark.parametrize("flags", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_a_tool_is_run_and_its_result_answered(
    llm: Command, scripted_server: Server, flags: tuple[str, ...]
) -> None:
    told = llm(scripted_server, *flags, "-T", "llm_version", "--td", f"{CALL}{TURN}That was it.")
    assert told.strip().endswith("That was it.")
