"""Stop strings and stop tokens end the content of an answer, not its reasoning or its calls, however the
engine cuts the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from headway.engine import FinishReason, SamplingParams, TokenEvent
from headway.server.formats import Content, Reasoning, find_format
from headway.server.generation.choice import Choice, ChoiceRequest, Delta
from headway.server.generation.choice_output import NumberedCall, OutputOptions
from headway.server.requests.services import Services
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.tokenizer import Tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
]
SILENT = "<|quiet|>"
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "<|call|>",
)
HERMES = '<think>\nfirst reply, then plan\n</think>\n\nGood reply.\n\nAnd: <tool_call>\n{"name": "f", "arguments": {"a": "reply."}}\n</tool_call> more'
OUTPUTS = {
    "hermes": HERMES,
    "llama_json": 'Good {"name": "f", "parameters": {"a": "Good"}} or <|python_tag|>{"name": "f", "parameters": {"a": "or"}}',
    "mistral": '[THINK]plan a[/THINK]Good a: [TOOL_CALLS]f[ARGS]{"a": "a:"}',
    "qwen_xml": "<think>x</think>A b<tool_call>\n<function=f>\n<parameter=a>\nA b\n</parameter>\n</function>\n</tool_call>c <tool_c",
    "harmony": (
        "<|channel|>analysis<|message|>plan Go<|end|><|start|>assistant<|channel|>commentary<|message|>Go on<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Go to\n\nit."
    ),
}  # fmt: skip


@cache
def library() -> HFTokenizer:
    library = tiny_tokenizers.byte_level()
    library.add_tokens([AddedToken(mark, special=True) for mark in (*MARKS, SILENT)])
    return library


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(library(), shown=MARKS)


def ids_of(text: str) -> list[int]:
    return list(library().encode(text, add_special_tokens=False).ids)


def run(
    name: str,
    ids: Sequence[int],
    width: int,
    *,
    min_tokens: int = 0,
    is_single_call: bool = False,
    **fields: Any,
) -> list[Delta]:
    """The deltas of a choice whose tokens come in rounds of a width, and end by their limit."""
    output = OutputOptions(find_format(None, name=name), "", TOOLS, is_single_call=is_single_call)
    request = ChoiceRequest([], SamplingParams(min_tokens=min_tokens), len(ids), output=output, **fields)
    choice, deltas = Choice(0, request, vocabulary()), list[Delta]()
    for start in range(0, len(ids), width):
        reason = FinishReason.LENGTH if start + width >= len(ids) else None
        deltas.append(choice.take(TokenEvent(0, list(ids[start : start + width]), reason)))
        if not choice.is_open:
            break
    return deltas


def parts_of(deltas: Sequence[Delta]) -> tuple[str, str, list[str]]:
    """(content, reasoning, arguments of the calls)"""
    parts = [part for delta in deltas for part in delta.parts or ()]
    texts = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in (Content, Reasoning)]
    return texts[0], texts[1], [part.arguments for part in parts if isinstance(part, NumberedCall)]


def stops_of(content: str) -> list[str]:
    return sorted(
        {content[i : i + n] for i in range(len(content)) for n in (1, 2, 3, 7)} | {"plan", '"a"', "nowhere"}
    )


def cut(content: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The content before the stop string that is complete first, and that string."""
    found = [(content.index(one) + len(one), content.index(one), one) for one in stop if one in content]
    _, start, first = min(found, default=(0, len(content), None))
    return content[:start], first


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_content_with_stops_is_the_content_without_them_cut_at_the_first(name: str) -> None:
    ids = ids_of(OUTPUTS[name])
    content, thoughts, calls = parts_of(run(name, ids, len(ids)))
    assert content
    for one in stops_of(content):
        stop = (one, "nowhere", content[-3:])
        expected, found = cut(content, stop)
        told = set()
        for width in (1, 2, 3, 7, len(ids)):
            deltas = run(name, ids, width, stop=stop, wants_tokens=width == 2)
            last = deltas[-1]
            assert (parts_of(deltas)[0], last.stop_reason) == (expected, found), (one, width)
            assert last.finish_reason in (("stop", "tool_calls") if found else ("length",))
            assert thoughts.startswith(parts_of(deltas)[1])
            assert parts_of(deltas)[2] == calls[: len(parts_of(deltas)[2])]
            told.add(sum(delta.num_tokens for delta in deltas))
        assert len(told) == 1, one  # the cuts change no count either


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_stop_that_is_shown_is_the_end_of_the_content(name: str) -> None:
    ids = ids_of(OUTPUTS[name])
    content, _, _ = parts_of(run(name, ids, len(ids)))
    for one in stops_of(content):
        expected, found = cut(content, [one])
        for width in (1, 4, len(ids)):
            deltas = run(name, ids, width, stop=(one,), shows_stop=True)
            assert parts_of(deltas)[0] == expected + (found or ""), (one, width)


def test_a_stop_string_counts_from_the_first_token_behind_the_least_number() -> None:
    text = "<think>a</think>Good a and a or a"
    ids = ids_of(text)
    for min_tokens in range(len(ids)):
        ripe = len(vocabulary().decode(ids[:min_tokens])) - len("<think>a</think>")
        content = "Good a and a or a"
        ends = [i for i, character in enumerate(content) if character == "a" and i >= ripe]
        for width in (1, 3, len(ids)):
            deltas = run("hermes", ids, width, stop=("a",), min_tokens=min_tokens)
            assert parts_of(deltas)[0] == (content[: ends[0]] if ends else content), (min_tokens, width)


@pytest.mark.parametrize("width", [1, 2, 100])
@pytest.mark.parametrize("name", OUTPUTS)
def test_stop_tokens_judge_the_content_alone(name: str, width: int) -> None:
    ids = ids_of(OUTPUTS[name])
    whole = run(name, ids, 1)
    parts = [part for delta in whole for part in delta.parts or () if isinstance(part, Content)]
    places = [part.start + i for part in parts for i in range(len(part.text))]
    content, starts, end = parts_of(whole)[0], dict[int, list[tuple[int, int]]](), 0
    for token_id in ids:
        text = vocabulary().decode([token_id])
        starts.setdefault(token_id, []).append((end, end + len(text)))
        end += len(text)
    for token_id, ranges in starts.items():
        first, last = next(((places.index(i), j) for i, j in ranges if i in places), (len(content), end))
        deltas = run(name, ids, width, stop_token_ids=(token_id,))
        told = parts_of(deltas)[0], deltas[-1].stop_reason
        assert told == (content[:first], token_id if first < len(content) else None)
        deltas = run(name, ids, width, stop_token_ids=(token_id,), shows_stop=True)
        assert parts_of(deltas)[0] == content[: sum(place < last for place in places)]


@pytest.mark.parametrize("width", [1, 2, 100])
@pytest.mark.parametrize(
    "fields", [{"stop": (SILENT,)}, {"stop": (f"d\n{SILENT}", "x")}, {"stop_token_ids": ids_of(SILENT)}]
)
def test_a_silent_token_ends_the_content_where_it_came(fields: dict[str, Any], width: int) -> None:
    ids = ids_of(f"<think>ad\n{SILENT}b</think>good\n{SILENT}more")
    deltas = run("hermes", ids, width, **fields)
    content, thoughts, _ = parts_of(deltas)
    expected = "goo" if fields.get("stop", "")[0:1] == (f"d\n{SILENT}",) else "good\n"
    assert (content, thoughts, deltas[-1].finish_reason) == (expected, "ad\nb", "stop")


def test_a_call_that_is_the_only_one_waits_for_no_stop() -> None:
    ids = ids_of('ab<tool_call>{"name": "f", "arguments": {}}</tool_call>c')
    for width in (1, len(ids)):
        deltas = run("hermes", ids, width, stop=("bc",), is_single_call=True)
        assert parts_of(deltas) == ("ab", "", ["{}"])
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("tool_calls", None)


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, RecordingChat(), template="<tool_call></think>")


CALLS: dict[str, Callable[[list[str]], tuple[str, dict[str, Any]]]] = {
    "chat": lambda stop: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": stop}),
    "responses": lambda stop: ("/v1/responses", {"input": "x", "stop": stop}),
    "messages": lambda stop: ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stop_sequences": stop}),
}  # fmt: skip


@pytest.mark.parametrize("api", CALLS)
async def test_stop_strings_leave_reasoning_alone_in_every_api(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], engine: FakeEngine, api: str
) -> None:
    write("<think>first reply, then plan</think>Good reply. More and more and more")
    path, body = CALLS[api](["reply"])
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    told = response.text
    assert "first reply, then plan" in told
    assert '"Good "' in told
    assert "More" not in told
    assert engine.aborted
