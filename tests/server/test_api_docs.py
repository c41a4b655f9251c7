"""docs/api.md says of every field what the code does, and names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine

from headway.server.body import BODY_SECONDS
from headway.server.cli.http_protocol import HEAD_SECONDS, STALLED_SECONDS
from headway.server.cli.serve import KEPT_SECONDS
from headway.server.protocol import chat, completions, parameters
from headway.server.services import Services
from headway.server.tokenizer import Tokenizer

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/api.md").read_text()
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
KINDS = {"completions": completions.CompletionRequest, "chat": chat.ChatRequest}
REFUSED = {
    "completions": parameters.NEUTRAL_VALUES | completions.NEUTRAL_VALUES,
    "chat": parameters.NEUTRAL_VALUES | chat.NEUTRAL_VALUES,
}
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+` \| (served|ignored|refused|-) \|", line)
]


def names_of_tests() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in TESTS.rglob("test_*.py")]
    functions = (
        n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions}


@pytest.mark.parametrize("endpoint", KINDS)
def test_the_page_has_a_row_for_every_field_and_no_other(endpoint: str) -> None:
    column = 1 + list(KINDS).index(endpoint)
    stated = {row[0]: row[column] for row in ROWS if row[column] != "-"}
    fields = set(KINDS[endpoint].__struct_fields__)
    refused = REFUSED[endpoint].keys() - IGNORED
    assert stated == {
        name: "ignored" if name in IGNORED else "refused" if name in refused else "served" for name in fields
    }


def test_every_row_names_a_test_that_exists() -> None:
    assert {row[4] for row in ROWS} <= names_of_tests()
    assert len(ROWS) == len({row[0] for row in ROWS})


@pytest.mark.parametrize("values", [parameters.RANGES, completions.RANGES], ids=["shared", "completions"])
def test_the_ranges_on_the_page_are_those_of_the_code(values: parameters.Ranges) -> None:
    told = {row[0]: row[3] for row in ROWS}
    for name, (low, high) in values.items():
        if 0 < high <= 128 and name != "top_p":
            assert f"{low:g} to {high:g}" in told[name]


def test_the_seconds_of_connections_on_the_page_are_those_of_the_code() -> None:
    section = PAGE.split("## Connections\n")[1].split("\n## ")[0]
    told = [int(seconds) for seconds in re.findall(r"(\d+) s\b", section)]
    assert told == [STALLED_SECONDS, HEAD_SECONDS, BODY_SECONDS, KEPT_SECONDS]


class AnyChat:
    async def render(self, messages: list[dict[str, str]]) -> str:
        return "x"


VALUES: dict[str, Any] = {
    "response_format": {"type": "json_object"}, "service_tier": "flex", "store": True, "suffix": "x",
    "tools": [{}], "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"}, "audio": {},
    "modalities": ["audio"], "prediction": {}, "reasoning_effort": "low", "verbosity": "low", "web_search_options": {},
}  # fmt: skip


class TestRefusals:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return Services("tiny", services.engine, services.tokenizer, services.metrics, AnyChat())

    @pytest.mark.parametrize("endpoint", KINDS)
    async def test_every_refused_field_is_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, endpoint: str
    ) -> None:
        path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[endpoint]
        start = {"completions": {"prompt": "x"}, "chat": {"messages": [{"role": "user", "content": "x"}]}}[
            endpoint
        ]
        for name, neutral in REFUSED[endpoint].items():
            if name in IGNORED:
                continue
            response = await client.post(path, json={**start, name: VALUES[name]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert response.json()["error"]["code"] == "unsupported_parameter"
            for value in (None, *neutral):
                assert (await client.post(path, json={**start, name: value})).status_code == 200
