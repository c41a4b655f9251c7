"""Bodies as editors, routers, agents and front ends send them: served, or refused by the name of a known
field that is not."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.grammar.grammars import Grammars
from headway.server.protocol import unserved
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

TEMPLATE = "{{ tools }}<tool_call>{{ enable_thinking }}"
TABLES: dict[str, tuple[unserved.Table, ...]] = {
    "/v1/completions": (unserved.COMPLETIONS, unserved.STRUCTURED_OUTPUTS),
    "/v1/chat/completions": (unserved.CHAT, unserved.STRUCTURED_OUTPUTS, unserved.MESSAGE, unserved.TOOL, unserved.FUNCTION),
    "/v1/responses": (unserved.RESPONSES, unserved.RESPONSES_TOOL),
    "/v1/messages": (unserved.MESSAGES, unserved.MESSAGES_OUTPUT),
}  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for entry in json.loads(Path(__file__).with_name("raw_bodies.json").read_text()):
    BODIES[entry["client"]].append(entry)


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, grammars: Grammars) -> Services:
    return fake_services(engine, tokenizer, RoleLines(), template=TEMPLATE, grammars=grammars)


def test_the_bodies_are_many() -> None:
    assert sum(map(len, BODIES.values())) >= 200
    assert len(BODIES) >= 50


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_of_a_client_is_served_or_refused_by_a_known_field(
    client: httpx.AsyncClient, name: str
) -> None:
    for entry in BODIES[name]:
        response = await client.post(entry["path"], json=entry["body"])
        if response.status_code == 200:
            continue
        error = response.json()["error"]
        details = error.get("details", {"error_code": error.get("code"), "param": error.get("param")})
        assert (response.status_code, details["error_code"]) == (400, "unsupported_parameter"), (entry, error)
        field = details["param"].rpartition("].")[2] if "]." in details["param"] else details["param"]
        groups = [table[field] for table in TABLES[entry["path"]] if field in table]
        assert groups, (entry, error)
        assert not groups[0].is_ignored
        assert groups[0].instead in error["message"]
