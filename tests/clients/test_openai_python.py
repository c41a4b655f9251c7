"""The official Python client: everything it is used for, its own types all the way."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from headway_testing.daemon import Server, start_server, stop_server
from openai.types.chat import ChatCompletionMessageParam

PROMPT = "def read_config(path):\n"
USER: ChatCompletionMessageParam = {"role": "user", "content": "import os"}


@pytest.fixture(scope="module")
def client(chat_server: Server) -> Iterator[openai.OpenAI]:
    url = f"{chat_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def test_a_completion_and_its_stream_give_one_text_and_one_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo-chat", prompt=PROMPT, max_tokens=24, seed=3)
    chunks = list(
        client.completions.create(
            model="demo-chat", prompt=PROMPT, max_tokens=24, seed=3, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_chat_and_its_stream_give_one_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo-chat", messages=[USER], max_completion_tokens=24, seed=3
    )
    chunks = list(
        client.chat.completions.create(
            model="demo-chat", messages=[USER], max_completion_tokens=24, seed=3, stream=True
        )
    )
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert told == whole.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_logprobs_are_one_for_each_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo-chat", messages=[USER], max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )  # fmt: skip
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 8
    assert "".join(entry.token for entry in told.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in told.content)


def test_history_of_dumped_replies_is_taken(client: openai.OpenAI) -> None:
    """`model_dump()` writes every field that is null, `annotations` and `tool_calls` among them."""
    messages: list[ChatCompletionMessageParam] = [USER]
    for _ in range(3):
        answer = client.chat.completions.create(model="demo-chat", messages=messages, max_completion_tokens=8)
        messages += [answer.choices[0].message.model_dump(), USER]  # type: ignore[list-item]
    assert len(messages) == 7


def test_a_stream_that_is_left_ends_its_request(client: openai.OpenAI, chat_server: Server) -> None:
    stream = client.completions.create(model="demo-chat", prompt=PROMPT, max_tokens=1500, stream=True)
    next(iter(stream))
    stream.close()
    chat_server.wait_until_idle()


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        client.completions.create(model="demo-chat", prompt=PROMPT, temperature=3)
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' does not exist"):
        client.completions.create(model="gpt-4o", prompt=PROMPT)


def test_a_request_that_took_too_long_is_not_sent_again() -> None:
    """With the client's usual two retries: the same request would take as long again."""
    sent: list[httpx.Request] = []
    server = start_server("--threads", "1", "--kv-cache-memory", "256MiB", "--request-timeout", "0.05")
    try:
        http = httpx.Client(event_hooks={"request": [sent.append]})
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client,
            pytest.raises(openai.InternalServerError) as raised,
        ):
            client.completions.create(model="headway-demo", prompt=PROMPT, max_tokens=2000)
    finally:
        assert stop_server(server) == 0
    assert raised.value.status_code == 504
    assert len(sent) == 1
