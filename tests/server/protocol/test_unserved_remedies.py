"""Each refusal of a field says what to do instead, and doing so is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.grammar.grammars import Grammars
from headway.server.protocol import unserved
from headway.server.protocol.unserved import Group
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "hello"}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [HELLO], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [HELLO], "max_tokens": 2},
    "/tokenize": {"messages": [HELLO]},
}
TABLES: dict[str, tuple[unserved.Table, ...]] = {
    "/v1/completions": (unserved.COMPLETIONS, unserved.STRUCTURED_OUTPUTS),
    "/v1/chat/completions": (unserved.CHAT, unserved.STRUCTURED_OUTPUTS, unserved.MESSAGE, unserved.CONTENT_PART, unserved.TOOL, unserved.FUNCTION),
    "/v1/responses": (unserved.RESPONSES, unserved.RESPONSES_TOOL, unserved.INPUT_ITEM),
    "/v1/messages": (unserved.MESSAGES, unserved.MESSAGES_BLOCK, unserved.MESSAGES_THINKING, unserved.MESSAGES_OUTPUT),
    "/tokenize": (unserved.TOKENIZE,),
}  # fmt: skip


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, grammars: Grammars) -> Services:
    return fake_services(engine, tokenizer, RoleLines(), grammars=grammars)


def refusing() -> Iterator[tuple[str, Group]]:
    seen: set[tuple[str, int]] = set()
    for path, tables in TABLES.items():
        for group in (group for table in tables for group in table.values()):
            if not group.is_ignored and (path, id(group)) not in seen:
                seen.add((path, id(group)))
                yield path, group


GROUPS = list(refusing())


def names_within(value: object) -> set[str]:
    """Every name and text of a body."""
    if isinstance(value, dict):
        return {*value}.union(*(names_within(entry) for entry in value.values()))
    if isinstance(value, list):
        return set[str]().union(*map(names_within, value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize(("path", "group"), GROUPS, ids=[f"{p}-{next(iter(g.values))}" for p, g in GROUPS])
async def test_the_remedy_of_a_refusal_is_served(client: httpx.AsyncClient, path: str, group: Group) -> None:
    """The example of a group does what its words say: it has a field that they name, at the path that they
    name."""
    assert group.instead
    where = group.path or path
    assert group.path in group.instead
    named = {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", group.instead)}
    followed = names_within({**LEAST[where], **group.example}) | {
        text.partition(".")[0] for text in names_within(dict(group.example))
    }
    assert named <= followed or (" or " in group.instead and named & followed), named - followed
    response = await client.post(where, json={**LEAST[where], **group.example})
    assert response.status_code == 200, response.text
    assert "x-headway-ignored" not in response.headers or "reasoning_effort" in group.example


def test_groups_that_refuse_are_few() -> None:
    assert 60 < len(GROUPS) < 120
