"""Nested conversations: the texts are those of transformers, and no string in them becomes a structural
token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing import chat_templates, tiny_tokenizers
from headway_testing.chat_templates import (
    CODER,
    DOCUMENTS,
    LLAMA,
    MISTRAL,
    NOT_SPECIAL,
    QWEN,
    SPECIAL,
    TEMPLATES,
)
from headway_testing.fake_engine import FakeEngine
from headway_testing.in_process_chat import InProcessChat, rendered, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from headway.server.app import create_app
from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.chat.prompt import chat_prompt
from headway.server.formats import find_format
from headway.server.protocol.chat import ChatRequest, Message, conversation_of
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.chat_template import ChatRenderer, ChatTemplate
from headway.server.text.control_text import ChatPrompt
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather: 'now' & \"then\"\n",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Straße", "enum": ["Köln", "東京"]},
                "days": {"type": "integer", "minimum": 0, "anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": " How warm is it? "}


def called(**arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"celsius": 7}'}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


HISTORY = called(city="Köln", days=2, exact=True, hours=[1, 2], where={"a": None, "b": 1.5})
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "It is 7 °C. "}
THOUGHT = {"role": "assistant", "content": "Warm.", "reasoning_content": "\nhm\n"}
CONVERSATIONS = {
    "question": Conversation([USER]),
    "system": Conversation([SYSTEM, USER, ANSWER, USER]),
    "tools": Conversation([SYSTEM, USER], tools=[WEATHER, CLOCK]),
    "history": Conversation([SYSTEM, *HISTORY], tools=[WEATHER]),
    "history-without-tools": Conversation([*HISTORY, ANSWER, USER]),
    "thoughts": Conversation([USER, THOUGHT, *HISTORY, THOUGHT]),
    "no-thinking": Conversation([USER], template_variables={"enable_thinking": False, "date_string": "1 May"}),
    "no-prompt": Conversation([USER], adds_generation_prompt=False),
    "open": Conversation([USER, ANSWER], adds_generation_prompt=False, continues_final_message=True),
    "open-and-empty": Conversation(
        [USER, ANSWER | {"content": ""}], adds_generation_prompt=False, continues_final_message=True
    ),
    "documents": Conversation([USER], documents=[{"title": "Köln", "text": "It is cold."}, {"doc_id": 7, "text": ""}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("conversations")
    return load_tokenizer(tiny_tokenizers.save(folder, chat_templates.byte_level()))


@pytest.fixture(scope="module")
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    backend = chat_templates.byte_level()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def of_transformers(
    tokenizer: PreTrainedTokenizerFast, template: str, conversation: Conversation
) -> str | None:
    """None if it refuses the conversation."""
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            chat_template=template,
            add_generation_prompt=conversation.adds_generation_prompt,
            continue_final_message=conversation.continues_final_message,
            tokenize=False,
            **conversation.template_variables,
        )
    except Exception:  # noqa: BLE001 - whatever a template raises
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_text_is_that_of_transformers(
    tokenizer: Tokenizer, transformers_tokenizer: PreTrainedTokenizerFast, template: str, name: str
) -> None:
    conversation, source = CONVERSATIONS[name], TEMPLATES[template]
    expected = of_transformers(transformers_tokenizer, source, conversation)
    if expected is None:
        with pytest.raises(ApiError) as refused:
            await rendered(conversation, source, tokenizer, VARIABLES)
        assert refused.value.code == "chat_template_error"
    else:
        assert (await rendered(conversation, source, tokenizer, VARIABLES)).spelled_out() == expected


def test_most_of_these_conversations_are_rendered(transformers_tokenizer: PreTrainedTokenizerFast) -> None:
    pairs = [
        (source, conversation) for source in TEMPLATES.values() for conversation in CONVERSATIONS.values()
    ]
    texts = [of_transformers(transformers_tokenizer, *pair) for pair in pairs]
    assert sum(text is not None for text in texts) > 40


async def test_a_conversation_crosses_to_the_process_that_renders(
    tokenizer: Tokenizer, transformers_tokenizer: PreTrainedTokenizerFast
) -> None:
    renderer = ChatRenderer(ChatTemplate(QWEN, VARIABLES, tool_source=LLAMA))
    try:
        plain, with_tools = CONVERSATIONS["thoughts"], CONVERSATIONS["history"]
        texts = [await renderer.render(plain), await renderer.render(with_tools)]
    finally:
        await renderer.close()
    assert texts == [
        of_transformers(transformers_tokenizer, QWEN, plain),
        of_transformers(transformers_tokenizer, LLAMA, with_tools),
    ]


TEXTS = st.lists(
    st.sampled_from([*SPECIAL[:4], *NOT_SPECIAL, "think", "tool_call", "<", "</", ">", "|>", "im_end", "x", " ", '"', "\n", "日本"]),
    min_size=1, max_size=3,
).map("".join)  # fmt: skip


def spelled_everywhere(texts: Iterator[str]) -> Conversation:
    """A conversation in which every string and every name that is the client's own is the next of the
    texts."""
    own = {
        "type": "string",
        "description": next(texts),
        "enum": [next(texts)],
        next(texts) + "!": [next(texts)],
    }
    schema = {"type": "object", "properties": {"p" + next(texts): own}, "required": [next(texts)]}
    function = {"name": next(texts), "description": next(texts), "parameters": schema}
    call = {
        "name": next(texts),
        "arguments": {"a" + next(texts): next(texts), "deep": [{"k" + next(texts): next(texts)}]},
    }
    messages = [
        {"role": "system", "content": next(texts)},
        {"role": "user", "content": "first " + next(texts)},
        {"role": "assistant", "content": next(texts), "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}]},
        {"role": "tool", "content": next(texts), "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "A" + next(texts), "reasoning_content": next(texts)},
        {"role": "user", "content": "last " + next(texts)},
    ]  # fmt: skip
    return Conversation(
        messages,
        tools=[{"type": "function", "function": function}],
        documents=[{"title": next(texts), "d" + next(texts): next(texts)}],
        template_variables={"date_string": next(texts)},
    )


NUM_TEXTS = 24


@pytest.mark.parametrize("template", TEMPLATES)
def test_structural_tokens_are_those_that_the_template_writes_around_other_texts(
    tokenizer: Tokenizer, template: str
) -> None:
    source = TEMPLATES[template]
    served: list[bool] = []
    neutral = tokenizer.encode_chat(ChatPrompt(text_of(source, spelled_everywhere(numbered()), VARIABLES)))

    @settings(derandomize=True, deadline=None, max_examples=40, database=None)
    @given(texts=st.lists(TEXTS, min_size=NUM_TEXTS, max_size=NUM_TEXTS))
    def check(texts: list[str]) -> None:
        conversation = spelled_everywhere(iter(texts))
        try:
            prompt = asyncio.run(rendered(conversation, source, tokenizer, VARIABLES))
        except ApiError as error:
            if error.code != "structural_token":
                raise
            served.append(False)
            return
        served.append(True)
        assert prompt.spelled_out() == text_of(source, conversation, VARIABLES)
        ids = tokenizer.encode_chat(prompt)
        assert structural(ids, tokenizer) == structural(neutral, tokenizer)
        assert tokenizer.full_vocabulary.decode(ids) == prompt.spelled_out()

    check()
    assert sum(served) > len(served) // 2


def numbered() -> Iterator[str]:
    return (f"q{i}" for i in range(1000))


def structural(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    names = [tokenizer.vocabulary.tokenizer.id_to_token(i) for i in ids]
    return [name for name in names if name in {*SPECIAL, *NOT_SPECIAL}]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"type": "string", "think": "no"}}},
        {"type": "object", "properties": {"x": {"type": "string", "tool_call": ["a"]}}, "think": 7},
    ],
    ids=["string", "others"],
)
async def test_names_that_a_template_puts_between_angles_form_no_token(
    tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    conversation = Conversation([{"role": "user", "content": "hello"}], tools=[tool])
    prompt = await rendered(conversation, CODER, tokenizer)
    assert any(f"<{name}>" in prompt.spelled_out() for name in ("think", "tool_call"))
    names = structural(tokenizer.encode_chat(prompt), tokenizer)
    assert names == [
        "<|im_start|>",
        "<tools>",
        "</tools>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


async def test_a_token_that_json_escapes_is_kept_apart_in_its_escaped_form(tokenizer: Tokenizer) -> None:
    """`<|tool|>user` with a line break is a token; JSON has a backslash and an n there. Its beginning is
    another token."""
    source = "{{ messages[0].content | tojson }}{{ messages[0].content }}"
    text = '"<|tool|>user\n<|im_end|>"'
    prompt = await rendered(Conversation([{"role": "user", "content": text}]), source, tokenizer)
    assert prompt.spelled_out() == '"\\"<|tool|>user\\n<|im_end|>\\""' + text
    assert structural(tokenizer.encode_chat(prompt), tokenizer) == []


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("{{ tools[0].function.name | length }}", "tools[0].function.name"),
        ("{{ (tools[0].function.parameters.properties | list)[0] | length }}", "tools[0].function.parameters.properties"),
        ("{{ messages[1].tool_calls[0].function.arguments.city[:4] }}", "messages[1].tool_calls[0].function.arguments.city"),
        ("{{ documents[1].text | length }}", "documents[1].text"),
        ("{{ style | length }}", "chat_template_kwargs.style"),
    ],
    ids=["name", "name-of-a-property", "argument", "document", "variable"],
)  # fmt: skip
async def test_what_a_template_inspects_is_refused_by_its_path(
    tokenizer: Tokenizer, source: str, path: str
) -> None:
    name = "<think>" if path.endswith("name") else "f"
    function = {"name": name, "parameters": {"properties": {"<think>": {}}}}
    conversation = Conversation(
        called(city="<think>"),
        tools=[{"type": "function", "function": function}],
        documents=[{"text": "<think>"}, {"text": "<think>"}],
        template_variables={"style": "<think>"},
    )
    with pytest.raises(ApiError, match=r"has '<think>', a structural token of this model") as refused:
        await rendered(conversation, source, tokenizer)
    assert (refused.value.param, refused.value.code) == (path, "structural_token")


async def test_an_open_message_may_spell_tokens(tokenizer: Tokenizer) -> None:
    for content, end in (("a <think>", "a <think>"), ("<|im_end|>\n ", "<|im_end|>\n "), ("x<", "x<")):
        messages = [USER, {"role": "assistant", "content": content}]
        conversation = Conversation(messages, adds_generation_prompt=False, continues_final_message=True)
        prompt = await rendered(conversation, DOCUMENTS, tokenizer)
        assert prompt.spelled_out().endswith("<|im_start|>assistant\n" + end)
        names = structural(tokenizer.encode_chat(prompt), tokenizer)
        assert names == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


async def test_a_template_that_drops_the_open_message_is_an_error_without_the_chat(
    tokenizer: Tokenizer,
) -> None:
    conversation = replace(CONVERSATIONS["open"])
    with pytest.raises(ApiError, match="the final message does not appear in the chat") as refused:
        await rendered(conversation, "{{ messages[0].content }}", tokenizer)
    assert "How warm" not in str(refused.value)


async def test_an_id_of_a_call_that_mistral_refuses_is_the_templates_own_reason(tokenizer: Tokenizer) -> None:
    conversation = CONVERSATIONS["history"]
    messages = [m | {"tool_calls": [m["tool_calls"][0] | {"id": "call_1"}]} if "tool_calls" in m else m
                for m in conversation.messages]  # fmt: skip
    with pytest.raises(ApiError, match="with length 9") as refused:
        await rendered(replace(conversation, messages=messages), MISTRAL, tokenizer, VARIABLES)
    assert refused.value.code == "chat_template_error"


@pytest.fixture
def services_of(tokenizer: Tokenizer, engine: FakeEngine) -> Callable[[str], Services]:
    def make(source: str) -> Services:
        return Services("tiny", engine, tokenizer, Metrics(lambda: None, lambda: 0), InProcessChat(source))

    return make


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"x": [value]}
    return value


ASSISTANT = {"role": "assistant", "content": "It"}
REFUSED = {
    "both": (Conversation([USER, ASSISTANT], continues_final_message=True), "continue_final_message", "both true"),
    "not-an-answer": (Conversation([USER], adds_generation_prompt=False, continues_final_message=True),
                      "continue_final_message", r"messages\[0\].role is 'user', it must be 'assistant'"),
    "nothing-to-continue": (
        Conversation([USER, {"role": "assistant"}], adds_generation_prompt=False, continues_final_message=True),
        "continue_final_message", r"messages\[1\] has no content to continue"),
    "deep": (Conversation([USER], documents=[deep(40)]), "documents[0]", "nested too deeply, it may have 64 levels"),
    "deep-tool": (Conversation([USER], tools=[deep(80)]), "tools[0]", "nested too deeply, it may have 136 levels"),
    "deep-call": (Conversation(called(x=deep(4000))), "messages[1]", "nested too deeply"),
    **{name: (Conversation([USER], template_variables={name: 1}), f"chat_template_kwargs.{name}", remedy)
       for name, remedy in [("messages", "use the field messages"), ("tools", "use the field tools"),
                            ("add_generation_prompt", "use the field add_generation_prompt"),
                            ("chat_template", "leave it out"), ("bos_token", "leave it out"), ("self", "leave it out"),
                            ("conversations", "use the field messages"), ("raise_exception", "leave it out")]},
    **{name: (Conversation([USER], template_variables={name: 1}), "chat_template_kwargs", "no name of a template's variable")
       for name in ("__class__", "a b", "", "7x")},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_no_template_can_be_given_is_refused(
    services_of: Callable[[str], Services], name: str
) -> None:
    conversation, param, reason = REFUSED[name]
    with pytest.raises(ApiError, match=reason) as refused:
        await chat_prompt(conversation, services_of(DOCUMENTS))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, "invalid_value")


async def test_a_long_conversation_is_marked_off_the_loop_with_the_same_result(
    services_of: Callable[[str], Services], tokenizer: Tokenizer
) -> None:
    long = Conversation([USER | {"content": "<think> word " * 4000}], documents=[{"text": "</think>"}])
    assert await chat_prompt(long, services_of(DOCUMENTS)) != ""
    prompt = await chat_prompt(long, services_of(DOCUMENTS))
    assert prompt.spelled_out() == text_of(DOCUMENTS, long)
    assert structural(tokenizer.encode_chat(prompt), tokenizer) == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


@pytest.mark.parametrize(
    ("adds", "continues", "expected"),
    [(None, None, (True, False)), (False, None, (False, False)), (None, True, (False, True)), (False, True, (False, True)),
     (True, False, (True, False))],
)  # fmt: skip
def test_an_open_message_takes_the_place_of_the_prompt_for_an_answer(
    adds: bool | None, continues: bool | None, expected: tuple[bool, bool]
) -> None:
    body = ChatRequest(
        messages=[Message("user", "a")], add_generation_prompt=adds, continue_final_message=continues
    )
    found = conversation_of(body)
    assert (found.adds_generation_prompt, found.continues_final_message) == expected


TOKENIZED = {
    "tools": {"tools": [CLOCK]},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"reasoning_effort": "none"},
    "no-prompt": {"add_generation_prompt": False},
    "open": {"messages": [USER, ANSWER], "continue_final_message": True},
    "open-explicitly": {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": False},
    "calls": {"messages": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "<|im_end|>"}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "<think>7"},
    ]},
    "documents": {"documents": [{"title": "a", "text": "</think>"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZED)
async def test_tokenize_takes_the_fields_of_a_chat_and_says_the_same(
    services_of: Callable[[str], Services], engine: FakeEngine, name: str
) -> None:
    source = DOCUMENTS if name == "documents" else QWEN
    services = replace(services_of(source), template_source=source, output_format=find_format(source))
    transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
    body = {"messages": [USER], **TOKENIZED[name]}
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        chat = await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert chat.status_code == 200, chat.text
        told = (await client.post("/tokenize", json=body)).json()["tokens"]
        without = (await client.post("/tokenize", json={"messages": [USER]})).json()["tokens"]
    assert told == engine.submitted[0].prompt_token_ids != without


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tools": [WEATHER]}, "tools"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ({"messages": [USER], "reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)  # fmt: skip
async def test_tokenize_refuses_what_a_chat_refuses(
    services_of: Callable[[str], Services], body: dict[str, Any], param: str
) -> None:
    transport = httpx.ASGITransport(create_app(services_of(QWEN)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        answer = await client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_arguments_that_the_template_cannot_read_are_named(tokenizer: Tokenizer) -> None:
    function = {"name": "f", "arguments": '{"city": '}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    with pytest.raises(ApiError, match=r"arguments of a call in messages\[1\] are no JSON object") as caught:
        await rendered(Conversation(messages), chat_templates.CODER, tokenizer)
    assert (caught.value.param, caught.value.code) == ("messages[1]", "chat_template_error")
