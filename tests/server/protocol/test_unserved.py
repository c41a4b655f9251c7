"""Fields that clients of other servers send: neutral values pass, others are refused with what to do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.protocol import unserved
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.responses_api import ResponsesRequest
from headway.server.protocol.unserved import PAGE, Group
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "hello"}
CASES = {
    "completions": ("/v1/completions", {"prompt": "hello"}, unserved.COMPLETIONS),
    "chat": ("/v1/chat/completions", {"messages": [HELLO]}, unserved.CHAT),
}
TABLES = CASES | {
    "tokenize": ("/tokenize", {"messages": [HELLO]}, unserved.TOKENIZE),
    "responses": ("/v1/responses", {"input": "hello"}, unserved.RESPONSES),
}
# What the request classes of vLLM 0.33 and SGLang 0.5.23 have as defaults, as a client that fills in all of
# them sends it. None of it changes the text of a server that lacks the field.
VLLM: dict[str, Any] = {
    "frequency_penalty": None, "logit_bias": None, "max_tokens": None, "n": 1, "presence_penalty": None,
    "response_format": None, "seed": None, "stop": [], "stream": False, "stream_options": None, "temperature": None,
    "top_p": None, "user": None, "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None,
    "watermarking": None, "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False,
    "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": None, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "prompt_logprobs": None, "logprob_token_ids": None,
    "allowed_token_ids": None, "bad_words": [], "structured_outputs": None, "priority": 0, "request_id": "a1b2",
    "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None, "return_weight_versions": False,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "mm_payload": "tensors", "return_mm_kwargs": None,
    "cache_salt": None, "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None,
    "repetition_detection": None, "thinking_token_budget": None, "stream_interval": None,
}  # fmt: skip
VLLM_OWN: dict[str, dict[str, Any]] = {
    "completions": {"echo": False, "logprobs": None, "suffix": None, "prompt_embeds": None},
    "chat": {
        "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "tools": None, "tool_choice": "none",
        "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "echo": False,
        "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "documents": None,
        "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None,
        "return_prompt_text": None,
    },
}  # fmt: skip
SGLANG: dict[str, Any] = {
    "frequency_penalty": 0.0, "logit_bias": None, "n": 1, "presence_penalty": 0.0, "seed": None, "stop": None,
    "stream": False, "stream_options": None, "user": None, "return_hidden_states": False,
    "return_routed_experts": False, "routed_experts_start_len": 0, "return_cached_tokens_details": False,
    "return_spec_tokens_details": False, "return_token_ids": False, "min_tokens": 0, "json_schema": None, "regex": None,
    "ebnf": None, "stop_token_ids": None, "stop_regex": None, "no_stop_trim": False, "ignore_eos": False,
    "skip_special_tokens": True, "lora_path": None, "session_id": None, "session_params": None, "response_format": None,
    "custom_params": None, "custom_logit_processor": None, "watermark": None, "images_config": None,
    "mm_processor_kwargs": None, "data_parallel_rank": None, "rid": None, "extra_key": None, "cache_salt": None,
    "priority": None, "custom_labels": None, "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None,
    "routed_dp_rank": None, "disagg_prefill_dp_rank": None,
}  # fmt: skip
SGLANG_OWN: dict[str, dict[str, Any]] = {
    "completions": {"best_of": None, "echo": False, "logprobs": None, "max_tokens": 16, "suffix": None, "top_k": -1,
                    "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    "chat": {
        "logprobs": False, "top_logprobs": None, "max_tokens": None, "max_completion_tokens": None, "tools": None,
        "tool_choice": "auto", "parallel_tool_calls": True, "return_prompt_token_ids": False, "return_meta_info": False,
        "return_input_ids_in_sglext": False, "return_output_ids_in_sglext": False, "return_sampling_mask": False,
        "sampling_logprobs_mode": None, "return_flat_raw_output_top_logprobs": False,
        "return_flat_raw_top_logprobs_b64": True, "reasoning_effort": None, "thinking": None, "task": None,
        "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True,
        "chat_template_kwargs": None, "max_dynamic_patch": None, "min_dynamic_patch": None,
        "use_audio_in_video": False, "video_config": None, "input_ids": None,
    },
}  # fmt: skip


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, RoleLines())


async def refusal(client: httpx.AsyncClient, endpoint: str, **body: Any) -> dict[str, Any]:
    path, least, _ = TABLES[endpoint]
    response = await client.post(path, json={**least, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("endpoint", CASES)
@pytest.mark.parametrize(("shared", "own"), [(VLLM, VLLM_OWN), (SGLANG, SGLANG_OWN)], ids=["vllm", "sglang"])
async def test_a_body_with_every_default_of_another_server_is_served(
    client: httpx.AsyncClient, endpoint: str, shared: dict[str, Any], own: dict[str, dict[str, Any]]
) -> None:
    path, least, _ = CASES[endpoint]
    response = await client.post(path, json={**shared, **own[endpoint], **least})
    assert response.status_code == 200, response.text


def test_every_field_of_a_chat_is_one_of_responses_or_refused_with_a_remedy() -> None:
    known = {*ResponsesRequest.__struct_fields__, *ResponsesRequest.other_names, *unserved.RESPONSES}
    assert [name for name in ChatRequest.__struct_fields__ if name not in known] == []


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("guided_json", {"type": "object"}, "use `text.format`, or `structured_outputs`"),
        ("guided_choice", ["a", "b"], "use `text.format`, or `structured_outputs`"),
        ("return_token_ids", True, "use /v1/chat/completions"),
        ("add_generation_prompt", False, "use /v1/chat/completions"),
        ("continue_final_message", True, "use /v1/chat/completions"),
    ],
)
async def test_a_field_of_chats_is_refused_by_responses_with_what_to_use_instead(
    client: httpx.AsyncClient, name: str, value: object, remedy: str
) -> None:
    error = await refusal(client, "responses", **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert remedy in error["message"]


@pytest.mark.parametrize("endpoint", CASES)
async def test_nulls_within_a_neutral_value_are_left_out(client: httpx.AsyncClient, endpoint: str) -> None:
    path, least, _ = CASES[endpoint]
    body: dict[str, Any] = {
        "response_format": {"type": "text", "json_schema": None},
        "vllm_xargs": {"a": None},
        "structured_outputs": {"json": None, "regex": None},
    }
    body["stream_options"] = {"include_usage": False, "continuous_usage_stats": None}  # of no stream
    assert (await client.post(path, json={**least, **body})).status_code == 200


@pytest.mark.parametrize("endpoint", TABLES)
async def test_every_neutral_value_passes_and_others_say_what_to_do(
    client: httpx.AsyncClient, engine: FakeEngine, endpoint: str
) -> None:
    path, least, table = TABLES[endpoint]
    neutral = {name: values[0] for name, group in table.items() if (values := group.values[name])}
    assert (await client.post(path, json={**dict.fromkeys(table), **neutral, **least})).status_code == 200
    engine.submitted.clear()
    for name, group in table.items():
        if group.is_ignored:
            continue
        error = await refusal(client, endpoint, **{name: {"another": "value"}})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        for words in (name, group.purpose, group.instead, PAGE):
            assert words in error["message"]
    assert not engine.submitted


def test_a_whole_number_is_neutral_in_both_spellings_and_a_truth_value_is_no_number() -> None:
    group = Group("x", "x", "x", {"a": (1.0,), "b": (False,)})
    assert [group.is_neutral("a", value) for value in (1, 1.0, True, 2)] == [True, True, False, False]
    assert [group.is_neutral("b", value) for value in (False, 0, True)] == [True, False, False]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "temperature is a string, it must be a number"),
        *(({"max_tokens": number}, "max_tokens",
           "max_tokens is a number with a fraction, or beyond 2^53 with a point or an exponent, it must be an integer")
          for number in (5.5, 1e30)),
        *(({"temperature": number}, "temperature", "temperature is out of range; numbers may be -1.79e308 to 1.79e308")
          for number in (10**400, -(10**400))),
        ({"stream": 1}, "stream", "stream is an integer, it must be true or false"),
        ({"n": True}, "n", "n is a boolean, it must be an integer"),
        ({"stop": 5}, "stop", "stop is an integer, it must be a string or an array"),
        ({"stop": ["a", {}]}, "stop[1]", "stop[1] is an object, it must be a string"),
        ({"logit_bias": []}, "logit_bias", "logit_bias is an array, it must be an object"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "an entry of logit_bias is a string, it must be a number"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage",
         "stream_options.include_usage is a string, it must be true or false"),
        ({"messages": ["x"]}, "messages[0]", "messages[0] is a string, it must be an object"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
         "messages[0].content is an integer, it must be a string or an array"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type",
         "messages[0].content[0].type is missing; it is required"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role",
         "messages[0].role is 'bot', it must be one of 'system', 'developer', 'user', 'assistant', 'tool', 'function'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing; it is required"),
        ({"messages": None}, "messages", "messages is missing; it is required"),
    ],
)  # fmt: skip
async def test_a_wrong_type_is_told_by_its_path_in_words_of_json(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, message: str
) -> None:
    error = await refusal(client, "chat", **body)
    assert (error["param"], error["message"]) == (param, message)


async def test_a_body_that_is_no_object_says_so(client: httpx.AsyncClient) -> None:
    error = (await client.post("/v1/completions", json=["x"])).json()["error"]
    assert (error["param"], error["message"]) == (None, "the body is an array, it must be an object")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000], ids=["high", "low", "long"])
async def test_a_number_that_no_reader_of_json_holds_is_refused(
    client: httpx.AsyncClient, number: str
) -> None:
    for field in ("temperature", "unheard_of"):
        body = f'{{"prompt": "hello", "{field}": {number}}}'
        error = (await client.post("/v1/completions", content=body)).json()["error"]
        assert error["code"] == "invalid_value"
        assert error["message"].startswith("the body has a number that is out of range; numbers may be")


async def test_whole_numbers_may_be_written_as_floats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "prompt": "hello",
        "max_tokens": 5.0,
        "n": 1.0,
        "top_k": 3.0,
        "seed": 7.0,
        "stop_token_ids": [5.0],
    }
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (engine.submitted[0].max_tokens, engine.submitted[0].sampling.top_k) == (5, 3)


ASSISTANTS: list[tuple[dict[str, Any], str]] = [
    ({"content": None, "refusal": "no"}, "no"), ({"refusal": "no"}, "no"), ({"content": None}, ""), ({"content": ""}, ""),
    ({"content": "x", "refusal": None}, "x"), ({"content": "x", "annotations": None}, "x"),
    ({"content": "x", "annotations": [], "audio": None, "function_call": None, "tool_calls": None}, "x"),
    ({"content": "x", "tool_calls": []}, "x"), ({"content": "x", "reasoning_content": "hm", "reasoning": "hm"}, "x"),
    ({"content": "x", "id": "msg_1", "provider_specific_fields": {"a": None}, "thinking_blocks": [{"type": "thinking"}]}, "x"),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, "x"),
    ({"content": [{"type": "output_text", "text": "x", "annotations": []}], "name": "bob"}, "x"),
    ({"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "annotations": None}, "x"),
    ({"content": "x", "unheard_of": None}, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "text"), ASSISTANTS)
async def test_history_as_clients_keep_it_is_read(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, message: dict[str, Any], text: str
) -> None:
    history = [HELLO, {"role": "assistant", **message}, HELLO]
    response = await client.post("/v1/chat/completions", json={"messages": history, "max_tokens": 2})
    assert response.status_code == 200, response.text
    prompt = tokenizer.full_vocabulary.decode(engine.submitted[0].prompt_token_ids)
    assert prompt == f"user: hello\nassistant: {text}\nuser: hello\n"


async def test_the_context_error_tells_the_tokens_that_were_asked_for(client: httpx.AsyncClient) -> None:
    error = await refusal(client, "completions", prompt=[5] * 300, max_tokens=10)
    assert error["message"] == (
        "This model's maximum context length is 256 tokens. However, you requested 310 tokens "
        "(300 in your prompt; 10 for the completion). Please reduce your prompt."
    )
