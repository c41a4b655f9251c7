"""smolagents, LlamaIndex, guidance, outlines and huggingface_hub, each as its users have it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def python(environment: Path) -> Path:
    return environment.parent / "frameworks/bin/python"


def is_item(item: Any) -> bool:
    return item["color"] in ("red", "green", "blue") and 0 <= item["count"] <= 99


def test_smolagents_runs_tools_and_code(python: Path, scripted_server: Server) -> None:
    told = told_by(python, HERE / "smolagents_session.py", scripted_server)
    assert told["calls"] == told["streamed"] == "It is 42."
    assert told["code"] == 42
    assert told["results"][0] == "42"


def test_llama_index_chats_and_calls(python: Path, tools_server: Server, scripted_server: Server) -> None:
    told = told_by(python, HERE / "llama_index_session.py", tools_server, scripted_server)
    assert told["complete"] == told["chat"] == "".join(told["streamed"]) == "Hello there."
    assert told["agent"] == "It is 42."
    assert is_item(told["object"])
    assert is_item(told["by_schema"])


def test_guidance_fills_its_gaps(python: Path, tools_server: Server) -> None:
    told = told_by(python, HERE / "guidance_session.py", tools_server)
    assert re.fullmatch("[0-9]{3}", told["number"])
    assert told["colour"] in ("red", "green")
    assert re.fullmatch(r'\{"n": [0-9]{1,2}\}', told["object"])


def test_outlines_gives_every_type(python: Path, tools_server: Server) -> None:
    told = told_by(python, HERE / "outlines_session.py", tools_server)
    assert told["literal"] in ("alpha", "beta")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", told["regex"], re.ASCII)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", told["date"], re.ASCII)
    assert told["boolean"] in ("True", "False")
    assert told["grammar"] in ("yes", "no")
    assert re.match("[+-]?[0-9]", told["integer"], re.ASCII)
    items = [told["object"], told["streamed"], told["openai"], *told["choices"]]
    assert all(is_item(json.loads(item)) for item in items)


def test_huggingface_hub_chats_and_calls(python: Path, tools_server: Server, scripted_server: Server) -> None:
    told = told_by(python, HERE / "huggingface_session.py", tools_server, scripted_server)
    assert told["text"] == told["streamed"] == "Hello there."
    assert told["call"][0] == "get_weather"
    assert json.loads(told["call"][1]) == {"city": "Paris"}
    assert 0 <= json.loads(told["by_schema"])["n"] <= 99
