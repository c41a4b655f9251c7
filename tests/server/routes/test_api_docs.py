"""docs/api.md says of every field what the code does, and names a test that exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.server.base.worker_pool import WAIT_SECONDS
from headway.server.cli.http_protocol import HEAD_SECONDS, LINGER_SECONDS, STALLED_SECONDS
from headway.server.cli.serve import KEPT_SECONDS
from headway.server.protocol import chat, completions, messages_api, parameters, responses_api, unserved
from headway.server.protocol.unserved import Group
from headway.server.requests.body import BODY_SECONDS

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "docs/api.md").read_text()
KINDS = {"completions": completions.CompletionRequest, "chat": chat.ChatRequest}


def rows_below(title: str) -> list[list[str]]:
    """The rows of a section's table of fields."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| `\w+` \| (served|ignored|-) \|", line)]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


ROWS = rows_below("Bodies of /v1/completions and /v1/chat/completions")
RESPONSES_ROWS = rows_below("Bodies of /v1/responses")


def names_of_tests() -> set[str]:
    """The functions that pytest collects: those of modules, and of classes in them."""
    definition = re.compile(r"^(?:    )?(?:async )?def (test_\w+)\(", re.MULTILINE)
    return {name for path in TESTS.rglob("test_*.py") for name in definition.findall(path.read_text())}


@pytest.mark.parametrize("endpoint", KINDS)
def test_the_page_has_a_row_for_every_field_and_no_other(endpoint: str) -> None:
    column = 1 + list(KINDS).index(endpoint)
    stated = {row[0]: row[column] for row in ROWS if row[column] != "-"}
    fields = set(KINDS[endpoint].__struct_fields__)
    assert stated == dict.fromkeys(fields, "served")


def test_the_page_has_a_row_for_every_field_of_responses_and_no_other() -> None:
    stated = {row[0]: row[1] for row in RESPONSES_ROWS}
    ignored = {"stream_options"}
    fields = responses_api.ResponsesRequest.__struct_fields__
    assert stated == {name: "ignored" if name in ignored else "served" for name in fields}
    assert len(stated) == len(RESPONSES_ROWS)


def test_the_page_has_a_row_for_every_field_of_anthropics_api_and_no_other() -> None:
    section = PAGE.split("## Anthropic's Messages API\n")[1].split("\n### ")[0]
    told = re.findall(r"^\| `(\w+)` \| .+ \| test_\w+ \|$", section, flags=re.MULTILINE)
    assert sorted(told) == sorted(messages_api.MessagesRequest.__struct_fields__)


def test_every_row_names_a_test_that_exists() -> None:
    names = names_of_tests()
    assert {row[4] for row in ROWS} | {row[3] for row in RESPONSES_ROWS} <= names
    assert set(re.findall(r"\btest_\w+", PAGE)) <= names, "the page names a test that does not exist"
    assert len(ROWS) == len({row[0] for row in ROWS})


def test_no_table_says_two_things_of_one_row() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        first = [line.split("|")[1].strip() for line in table.splitlines()]
        assert len(first) == len(set(first)), [cell for cell in first if first.count(cell) > 1]


@pytest.mark.parametrize("values", [parameters.RANGES, completions.RANGES], ids=["shared", "completions"])
def test_the_ranges_on_the_page_are_those_of_the_code(values: parameters.Ranges) -> None:
    told = {row[0]: row[3] for row in ROWS}
    for name, (low, high) in values.items():
        if 0 < high <= 128 and name != "top_p":
            assert f"{low:g} to {high:g}" in told[name]


def test_the_seconds_of_connections_on_the_page_are_those_of_the_code() -> None:
    section = PAGE.split("## Connections\n")[1].split("\n## ")[0]
    told = [int(seconds) for seconds in re.findall(r"(\d+) s\b", section)]
    assert told == [STALLED_SECONDS, WAIT_SECONDS, HEAD_SECONDS, BODY_SECONDS, KEPT_SECONDS, LINGER_SECONDS]


def test_the_page_has_every_other_name_of_a_field() -> None:
    section = PAGE.split("## Other names\n")[1].split("\n## ")[0]
    told = [line for line in section.splitlines() if line.startswith("| `")]
    assert told == other_names_rows()


def other_names_rows() -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for kind in (
        completions.CompletionRequest,
        chat.ChatRequest,
        responses_api.ResponsesRequest,
        messages_api.MessagesRequest,
    ):
        for name, own in kind.other_names.items():
            found.setdefault(own, {})[name] = None
    return [f"| `{own}` | {', '.join(f'`{name}`' for name in names)} |" for own, names in found.items()]


def rows_of(*groups: Group) -> list[str]:
    return [_row(group) for group in groups]


def _row(group: Group) -> str:
    fields = ", ".join(f"`{name}`{_values(group, name)}" for name in group.values)
    instead = "ignored" if group.is_ignored else group.instead
    return f"| {fields} | {group.origin} | {group.purpose} | {instead} |"


def _values(group: Group, name: str) -> str:
    values = ["`" + json.dumps(value).replace("|", "\\|") + "`" for value in group.values[name]]
    return f" ({', '.join(values)})" if values else ""


@pytest.mark.parametrize(
    ("title", "tables"),
    [
        ("In bodies", (unserved.COMPLETIONS, unserved.CHAT)),
        ("In structured_outputs", (unserved.STRUCTURED_OUTPUTS,)),
        ("In messages", (unserved.MESSAGE, unserved.CONTENT_PART)),
        (
            "In bodies of /v1/messages",
            (
                unserved.MESSAGES,
                unserved.MESSAGES_BLOCK,
                unserved.MESSAGES_THINKING,
                unserved.MESSAGES_OUTPUT,
            ),
        ),
        ("In tools", (unserved.TOOL, unserved.FUNCTION)),
        ("In bodies of /v1/responses", (unserved.RESPONSES, unserved.INPUT_ITEM)),
        ("In tools of /v1/responses", (unserved.RESPONSES_TOOL,)),
    ],
)
def test_the_tables_of_unserved_fields_are_those_of_the_code(
    title: str, tables: tuple[unserved.Table, ...]
) -> None:
    section = PAGE.split(f"### {title}\n")[1].split("\n##")[0]
    groups = {id(group): group for table in tables for group in table.values()}
    if "/v1/" in title:  # those of every API are told once
        shared = {group.purpose for group in unserved.SHARED}
        groups = {key: group for key, group in groups.items() if group.purpose not in shared}
    told = [line for line in section.splitlines() if line.startswith("| `")]
    assert told == rows_of(*groups.values())
