"""Bodies held against the types of the installed `openai` package: no field of them is unknown here.

A release that adds a field fails one of these tests until a table of ours says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx
import msgspec
import openai
import pydantic
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from openai.types import Model, completion, completion_choice, completion_create_params, completion_usage
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_assistant_message_param,
    chat_completion_chunk,
    chat_completion_message_function_tool_call,
    chat_completion_token_logprob,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseError,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseTextConfigParam,
    ResponseToolSearchCall,
    ToolChoiceAllowedParam,
    ToolChoiceFunctionParam,
    ToolParam,
    response_create_params,
    response_usage,
)
from openai.types.responses.response_input_param import ResponseInputItemParam
from openai.types.shared_params import Reasoning
from typing_extensions import is_typeddict

from headway.server.protocol import chat, completions, responses_api, usage
from headway.server.protocol import responses_objects as objects
from headway.server.protocol.decoding import decode
from headway.server.protocol.models import ModelCard
from headway.server.protocol.parameters import StreamOptions
from headway.server.requests.answer import ChunkHeader
from headway.server.requests.services import Services
from headway.server.responses_api.input import KINDS
from headway.server.responses_api.input import LEFT_OUT as LEFT_OUT_ITEMS
from headway.server.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "hello"}
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any], tuple[type, ...]]] = {
    "completions": (completions.CompletionRequest, {"prompt": "hello"}, (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming)),
    "chat": (chat.ChatRequest, {"messages": [HELLO]}, (
        chat_create_params.CompletionCreateParamsNonStreaming,
        chat_create_params.CompletionCreateParamsStreaming)),
    "responses": (responses_api.ResponsesRequest, {"input": "hello"}, (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming)),
}  # fmt: skip
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
PARTS = {"text", "refusal"}  # served
OTHER_PARTS = {"image_url", "input_audio", "file"}  # refused by their type
PART_FIELDS = {"type", "text", "refusal", "prompt_cache_breakpoint"}
# Fields of OpenAI's answers that this server never has.
LEFT_OUT = {
    "ChatCompletion": {"service_tier", "metadata", "moderation"},
    "ChatCompletionChunk": {"service_tier", "moderation", "obfuscation"},
    "ChatCompletionMessage": {"annotations", "audio", "function_call"},
    "ChoiceDelta": {"audio", "function_call", "refusal"},
    "CompletionTokensDetails": {"audio_tokens", "text_tokens"},
    "Model": {"shutdown_date"},
    "PromptTokensDetails": {"audio_tokens", "cache_write_tokens", "image_tokens", "text_tokens"},
    "InputTokensDetails": {"cache_write_tokens_details"},
    "Response": {"access_programs", "conversation", "image", "input_transformations", "moderation", "prompt", "prompt_cache_diagnostics",
                 "prompt_cache_options", "prompt_cache_retention", "tool_usage"},
    "ResponseError": {"misalignment", "param", "type"},
    "ResponseCustomToolCall": {"async_", "caller"},
    "ResponseFunctionToolCall": {"async_", "caller"},
    "ResponseToolSearchCall": {"created_by"},
    "ResponseOutputMessage": {"phase"},
}  # fmt: skip
ANSWERS: list[tuple[type[pydantic.BaseModel], set[str]]] = [
    (chat_completion.ChatCompletion, set(chat.ChatCompletion.__struct_fields__)),
    (chat_completion.Choice, set(chat.ChatChoice.__struct_fields__)),
    (chat_completion.ChoiceLogprobs, set(chat.ChoiceLogprobs.__struct_fields__)),
    (ChatCompletionMessage, set(chat.AnswerMessage.__struct_fields__)),
    (chat_completion_chunk.ChatCompletionChunk, {*ChunkHeader.__struct_fields__, "choices", "usage"}),
    (chat_completion_chunk.Choice, set(chat.ChatChunkChoice.__struct_fields__)),
    (chat_completion_chunk.ChoiceDelta, set(chat.ChatDelta.__struct_fields__)),
    (chat_completion_chunk.ChoiceDeltaToolCall, set(chat.DeltaCall.__struct_fields__)),
    (
        chat_completion_message_function_tool_call.ChatCompletionMessageFunctionToolCall,
        set(chat.AnswerCall.__struct_fields__),
    ),
    (chat_completion_message_function_tool_call.Function, set(chat.AnswerFunction.__struct_fields__)),
    (completion.Completion, set(completions.Completion.__struct_fields__)),
    (completion.CompletionChoice, set(completions.CompletionChoice.__struct_fields__)),
    (completion_choice.Logprobs, set(completions.CompletionLogprobs.__struct_fields__)),
    (ChatCompletionTokenLogprob, set(chat.TokenLogprob.__struct_fields__)),
    (chat_completion_token_logprob.TopLogprob, set(chat.TopLogprob.__struct_fields__)),
    (Model, set(ModelCard.__struct_fields__)),
    (completion_usage.CompletionUsage, set(usage.Usage.__struct_fields__)),
    (completion_usage.CompletionTokensDetails, set(usage.CompletionTokensDetails.__struct_fields__)),
    (completion_usage.PromptTokensDetails, set(usage.PromptTokensDetails.__struct_fields__)),
    (Response, set(objects.ResponseObject.__struct_fields__)),
    (response_usage.ResponseUsage, set(objects.ResponseUsage.__struct_fields__)),
    (response_usage.InputTokensDetails, set(objects.InputTokensDetails.__struct_fields__)),
    (response_usage.OutputTokensDetails, set(objects.OutputTokensDetails.__struct_fields__)),
    (ResponseError, set(objects.ResponseFault.__struct_fields__)),
    (ResponseOutputMessage, {"type", *objects.MessageItem.__struct_fields__}),
    (ResponseOutputText, {"type", *objects.OutputText.__struct_fields__}),
    (ResponseReasoningItem, {"type", *objects.ReasoningItem.__struct_fields__}),
    (ResponseFunctionToolCall, {"type", *objects.FunctionCallItem.__struct_fields__}),
    (ResponseCustomToolCall, {"type", *objects.CustomCallItem.__struct_fields__}),
    (ResponseToolSearchCall, {"type", *objects.SearchCallItem.__struct_fields__}),
]
# What a request of /v1/responses nests, and what of it is known here.
NESTED: list[tuple[Any, type[msgspec.Struct]]] = [
    (ResponseTextConfigParam, responses_api.TextOptions),
    (ResponseFormatTextJSONSchemaConfigParam, responses_api.TextFormat),
    (Reasoning, responses_api.ReasoningOptions),
    (response_create_params.StreamOptions, responses_api.ResponsesStreamOptions),
    (ToolChoiceFunctionParam, responses_api.ChoiceOfTools),
    (ToolChoiceAllowedParam, responses_api.ChoiceOfTools),
]


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, RoleLines())


def known_fields(kind: type[msgspec.Struct]) -> set[str]:
    return {*kind.__struct_fields__, *getattr(kind, "unserved", {})}


def typed_dicts(annotation: object) -> Iterator[Any]:
    """The TypedDicts of a union, also those within Iterable and Required."""
    if is_typeddict(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from typed_dicts(argument)


def literals(annotation: object) -> Iterator[object]:
    """The values of a Literal, also of an optional one."""
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        yield from literals(argument)


MESSAGES = list(typed_dicts(ChatCompletionMessageParam))
CONTENTS = [ChatCompletionContentPartParam, chat_completion_assistant_message_param.ContentArrayOfContentPart]
TOOLS = list(typed_dicts(ToolParam))
ITEMS = list(typed_dicts(ResponseInputItemParam))
CONTENT_PARTS = list({part.__name__: part for kind in CONTENTS for part in typed_dicts(kind)}.values())


def test_the_walk_finds_what_it_looks_for() -> None:
    assert {get_args(get_type_hints(m)["role"])[0] for m in MESSAGES} == set(chat.ROLES)
    assert {get_args(get_type_hints(p)["type"])[0] for p in CONTENT_PARTS} == PARTS | OTHER_PARTS


@pytest.mark.parametrize("endpoint", BODIES)
async def test_every_request_parameter_is_known_and_null_is_left_out(
    client: httpx.AsyncClient, endpoint: str
) -> None:
    kind, least, parameters = BODIES[endpoint]
    names = {name for params in parameters for name in get_type_hints(params)}
    assert names - known_fields(kind) == set()
    nulls = dict.fromkeys(names - least.keys())
    response = await client.post(PATHS[endpoint], json={**nulls, **least})
    assert response.status_code == 200, response.text


def test_every_stream_option_is_known() -> None:
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) <= known_fields(StreamOptions)


@pytest.mark.parametrize(("params", "kind"), NESTED, ids=[params.__name__ for params, _ in NESTED])
def test_every_field_within_a_field_of_responses_is_known(params: Any, kind: type[msgspec.Struct]) -> None:
    assert set(get_type_hints(params)) <= known_fields(kind)


@pytest.mark.parametrize("tool", TOOLS, ids=[tool.__name__ for tool in TOOLS])
async def test_every_tool_of_responses_is_a_function_or_left_out(
    client: httpx.AsyncClient, tool: Any
) -> None:
    hints = get_type_hints(tool)
    assert set(hints) - known_fields(responses_api.ResponseTool) == set()
    kind = get_args(hints["type"])[0]
    if kind not in ("function", "custom", "namespace"):
        sent = dict.fromkeys(hints, "x") | {"type": kind, "name": "x", "parameters": {}, "description": "x"}
        body = {"input": "hello", "tools": [sent], "max_output_tokens": 2}
        response = await client.post("/v1/responses", json=body)
        assert (response.status_code, response.headers["x-headway-ignored"]) == (200, "tools[0]"), (
            response.text
        )


@pytest.mark.parametrize("item", ITEMS, ids=[item.__name__ for item in ITEMS])
async def test_every_item_of_responses_is_read_left_out_or_refused_by_its_type(
    client: httpx.AsyncClient, item: Any
) -> None:
    hints = get_type_hints(item)
    (kind,) = literals(hints["type"])
    sent = {"role": "user", "content": "x", "name": "x", "arguments": "{}", "output": "x", "summary": []}
    foreign = (
        {"tools": [{"name": "x", "input_schema": {}, "annotations": {}}]}
        if kind == "mcp_list_tools"
        else {"tools": []}
    )
    own = {name: {"action": {}, **foreign, **sent}.get(name, "x") for name in hints} | {"type": kind}
    messages = [{"role": "user", "content": "x"}, own]
    response = await client.post(
        "/v1/responses", json={"input": messages[kind in KINDS :], "max_output_tokens": 2}
    )
    is_left_out = kind in LEFT_OUT_ITEMS or kind.startswith(
        "tool_search"
    )  # by an execution that is not the client's
    told = response.headers.get("x-headway-ignored", "").split(", ")
    assert ("input[1]" in told) is is_left_out
    if is_left_out or kind in (*KINDS, "additional_tools", "local_shell_call"):
        assert response.status_code == 200, response.text
    else:
        assert response.json()["error"]["param"] == "input[1].type"


@pytest.mark.parametrize("message", MESSAGES, ids=[message.__name__ for message in MESSAGES])
def test_every_field_of_every_message_is_known_and_null_is_left_out(message: Any) -> None:
    names = set(get_type_hints(message))
    assert names - known_fields(chat.Message) == set()
    body = {"messages": [{**dict.fromkeys(names), **HELLO}]}
    assert decode(msgspec.json.encode(body), chat.ChatRequest).messages[0].content == "hello"


@pytest.mark.parametrize("part", CONTENT_PARTS, ids=[part.__name__ for part in CONTENT_PARTS])
def test_every_field_of_every_content_part_is_served_ignored_or_refused(part: Any) -> None:
    names, kind = set(get_type_hints(part)), get_args(get_type_hints(part)["type"])[0]
    assert names - PART_FIELDS == ({kind} if kind in OTHER_PARTS else set())


@pytest.mark.parametrize(("model", "ours"), ANSWERS, ids=[model.__name__ for model, _ in ANSWERS])
def test_every_field_of_an_answer_is_given_or_left_out_by_design(
    model: type[pydantic.BaseModel], ours: set[str]
) -> None:
    assert set(model.model_fields) - ours == LEFT_OUT.get(model.__name__, set())


@pytest.mark.parametrize("changes", [{}, {"content": None, "refusal": "no"}, {"content": None}])
async def test_an_answer_dumped_into_the_history_is_read_again(
    address: str, engine: FakeEngine, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        history: list[Any] = [HELLO]
        answer = await official.chat.completions.create(model="tiny", messages=history, max_tokens=4)
        history += [{**answer.choices[0].message.model_dump(), **changes}, HELLO]
        await official.chat.completions.create(model="tiny", messages=history, max_tokens=4)
    said = {"content": answer.choices[0].message.content, "refusal": None} | changes
    prompt = tokenizer.full_vocabulary.decode(engine.submitted[-1].prompt_token_ids)
    assert f"\nassistant: {said['content'] or said['refusal'] or ''}\nuser: " in prompt


async def test_all_that_the_client_dumps_of_a_message_is_known(address: str) -> None:
    """Also what `parse` adds, and what the dump of a choice or an answer has, if somebody appends those'
    fields."""
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        answer = await official.chat.completions.create(model="tiny", messages=[HELLO], max_tokens=4)  # type: ignore[list-item]
    for dump in (answer.choices[0].message.model_dump(), answer.choices[0].message.to_dict()):
        body = {"messages": [HELLO, {**dump, "parsed": None}]}
        assert len(decode(msgspec.json.encode(body), chat.ChatRequest).messages) == 2
