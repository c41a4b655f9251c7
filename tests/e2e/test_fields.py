"""Every field of a request against the real engine and the embedded model, at its full depth and without
drafts."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.slow

PROMPT = "def read_config(path):\n"
DEPTHS = pytest.mark.parametrize("depth", [0, 3], ids=["no-drafts", "3-drafts"])


@pytest.fixture
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, depth: int = 3, **body: Any) -> dict[str, Any]:
    """The answer; greedy unless the body says otherwise."""
    speculation = {"max_draft_tokens": depth}
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "speculation": speculation, **body}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def choice(client: httpx.Client, depth: int = 3, **body: Any) -> dict[str, Any]:
    return complete(client, depth, return_token_ids=True, **body)["choices"][0]


def ids_of(client: httpx.Client, text: str) -> list[int]:
    return client.post("/tokenize", json={"prompt": text}).json()["tokens"]


@DEPTHS
def test_logprobs_are_those_of_an_echo_of_the_same_tokens(client: httpx.Client, depth: int) -> None:
    """What was told while generating equals what is told of the same text as a prompt."""
    made = choice(client, depth, logprobs=5)
    ids, told = made["token_ids"], made["logprobs"]["token_logprobs"]
    whole = choice(client, prompt=made["prompt_token_ids"] + ids, echo=True, logprobs=5, max_tokens=0)
    scored = whole["logprobs"]["token_logprobs"]
    assert scored[0] is None
    assert scored[-len(ids) :] == pytest.approx(told, abs=1e-3)
    for value, top in zip(told, made["logprobs"]["top_logprobs"], strict=True):
        assert value == max(top.values())
        assert 5 <= len(top) <= 6
        assert sum(map(math.exp, top.values())) <= 1 + 1e-4


def test_logprobs_do_not_depend_on_depth_or_sampling(client: httpx.Client) -> None:
    """They are those of the raw logits."""
    sampled = {"temperature": 0.8, "seed": 5, "logprobs": 2, "frequency_penalty": 0.5}
    plain, drafted = (choice(client, depth, **sampled) for depth in (0, 3))
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(
        drafted["logprobs"]["token_logprobs"], abs=1e-3
    )
    prompt = plain["prompt_token_ids"] + plain["token_ids"]
    scored = choice(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["logprobs"]["token_logprobs"]
    assert scored[-len(plain["token_ids"]) :] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-3)


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"logit_bias": {"100": 30.0}},
    {"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "bad_words": ["self"], "min_tokens": 20},
]  # fmt: skip


@pytest.fixture(scope="module")
def likeliest() -> dict[str, str]:
    """By server, the text without any of the fields."""
    return {}


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_a_field_changes_the_text_and_drafts_do_not(
    client: httpx.Client, likeliest: dict[str, str], fields: dict[str, Any]
) -> None:
    plain, drafted = (choice(client, depth, max_tokens=48, **fields) for depth in (0, 3))
    assert plain["text"] == drafted["text"]
    url = str(client.base_url)
    if url not in likeliest:
        likeliest[url] = choice(client, max_tokens=48)["text"]
    assert plain["text"] != likeliest[url]


@DEPTHS
def test_a_bias_forces_and_bans_tokens(client: httpx.Client, depth: int) -> None:
    first = choice(client)["token_ids"][0]
    assert first not in choice(client, depth, logit_bias={str(first): -100})["token_ids"]
    forced = choice(client, depth, logit_bias={"42": 100}, max_tokens=8, ignore_eos=True)
    assert forced["token_ids"] == [42] * 8


@DEPTHS
def test_only_allowed_tokens_come(client: httpx.Client, depth: int) -> None:
    allowed = [10, 20, 30]
    assert set(choice(client, depth, allowed_token_ids=allowed, ignore_eos=True)["token_ids"]) <= set(allowed)


@DEPTHS
def test_bad_words_do_not_come_in_the_spelling_of_the_tokenizer(client: httpx.Client, depth: int) -> None:
    words = ["config", "return", "open", "path"]
    spelled = [ids_of(client, text) for word in words for text in (word, f" {word}")]

    def comes(ids: list[int]) -> bool:
        return any(ids[i : i + len(word)] == word for word in spelled for i in range(len(ids)))

    assert comes(choice(client, max_tokens=64)["token_ids"])
    assert not comes(choice(client, depth, max_tokens=64, bad_words=words)["token_ids"])


@DEPTHS
@pytest.mark.parametrize("min_tokens", [0, 1, 5, 12])
def test_stop_ids_end_the_text_once_there_are_min_tokens(
    client: httpx.Client, depth: int, min_tokens: int
) -> None:
    (newline,) = ids_of(client, "\n")
    body = {"stop_token_ids": [newline], "min_tokens": min_tokens, "max_tokens": 60}
    answer = complete(client, depth, return_token_ids=True, **body)
    made = answer["choices"][0]
    ids, has_stopped = made["token_ids"], made["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert newline not in ids[: len(ids) - has_stopped]
    assert (ids[-1] == newline) == has_stopped
    assert len(ids) >= min_tokens + has_stopped
    if has_stopped:
        shown = choice(client, depth, include_stop_str_in_output=True, **body)
        assert shown["text"] == made["text"] + "\n"


@DEPTHS
@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
def test_an_echo_that_generates_the_end_has_an_entry_for_each_token(
    client: httpx.Client, depth: int, stream: bool
) -> None:
    """What lm-eval asks for: the log-probabilities of a continuation, and of one token more, which it
    drops."""
    context, continuation = "if __name__ == '__main__':", "\n    main()\n"
    prompt = ids_of(client, context + continuation)
    wish = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
    (expected,) = complete(client, depth, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"]
    told, usage = echoed(client, depth, stream=stream, **wish)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 1)
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(told, len(prompt) + 1)
    assert told["tokens"][:-1] == expected["logprobs"]["tokens"]
    assert told["token_logprobs"][1:-1] == pytest.approx(expected["logprobs"]["token_logprobs"][1:], abs=1e-3)
    assert told["text_offset"][-1] == len(context + continuation)
    assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


def echoed(
    client: httpx.Client, depth: int, *, stream: bool, **body: Any
) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """The log-probabilities and the usage of a choice that ends by the model's own end; a stream's put
    together."""
    if not stream:
        answer = complete(client, depth, **body)
        (made,) = answer["choices"]
        assert made["finish_reason"] == "stop"
        return made["logprobs"], answer["usage"]
    body |= {"temperature": 0, "speculation": {"max_draft_tokens": depth}, "stream": True}
    body["stream_options"] = {"include_usage": True}
    events = client.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events]
    pieces = [part["choices"][0] for part in parts]
    assert pieces[-1]["finish_reason"] == "stop"
    lists = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return {name: [x for one in lists for x in one[name]] for name in lists[0]}, last["usage"]


def test_best_of_is_the_likeliest_of_n(client: httpx.Client) -> None:
    sampled = {"temperature": 1.0, "seed": 9, "max_tokens": 12}
    candidates = complete(client, n=4, logprobs=0, **sampled)["choices"]
    best = max(candidates, key=lambda c: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]))
    answer = complete(client, best_of=4, **sampled)
    assert [c["text"] for c in answer["choices"]] == [best["text"]]
    assert answer["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in candidates)


def test_a_report_agrees_with_the_usage(client: httpx.Client) -> None:
    answer = complete(client, 2, speculation={"max_draft_tokens": 2, "report": True}, max_tokens=60)
    report, details = answer["speculation"], answer["usage"]["completion_tokens_details"]
    assert len(report["drafted_per_position"]) == report["max_draft_tokens"] == 2
    assert sum(report["accepted_per_position"]) == details["accepted_prediction_tokens"] > 0
    state = client.get("/v1/speculation").json()
    assert (state["depth"], state["has_mtp"]) == (3, True)
    assert 1 < state["acceptance_length"] <= 4


def test_masks_that_leave_no_token_are_refused_and_the_engine_lives(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "allowed_token_ids": [0], "min_tokens": 3}
    response = client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
    assert "no token is left" in response.json()["error"]["message"]
    assert client.get("/health/generate").status_code == 200


def test_another_salt_finds_no_cached_prefix(client: httpx.Client, server: Any) -> None:
    prompt = PROMPT * 12
    hits, told = [], []
    for salt in ("one", "one", "two"):
        before = server.metric("headway_prefix_cache_hit_tokens_total")
        answer = complete(client, prompt=prompt, cache_salt=salt, max_tokens=2)
        told.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        server.wait_until_idle()
        hits.append(server.metric("headway_prefix_cache_hit_tokens_total") - before)
    assert hits[0] == hits[2] == 0 < hits[1]
    assert told == hits


def test_the_embedded_model_answers_a_first_chat_with_code(client: httpx.Client) -> None:
    """It was not trained to chat: its template makes comments of the messages, and it continues the code
    after them."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write a function\nthat reads a file"},
    ]
    response = client.post("/v1/chat/completions", json={"messages": messages, "n": 8, "seed": 1})
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    contents = [choice["message"]["content"] for choice in choices]
    assert all(content.strip() and "\n\n\n" not in content for content in contents)
    assert sum(choice["finish_reason"] == "stop" for choice in choices) >= 4
    assert sum(map(is_python, contents)) >= 4


def is_python(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False


def test_the_official_client_chats(templated: Any) -> None:
    official = openai.OpenAI(base_url=f"{templated.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "system", "content": "x = 1"}, {"role": "user", "content": "import os"}]
    answer = official.chat.completions.create(
        model="demo-tools",
        messages=messages,
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    text = answer.choices[0].message.content
    assert text
    turns = "<|im_start|>system\nx = 1<|im_end|>\n<|im_start|>user\nimport os<|im_end|>\n"
    prompt = f"{turns}<|im_start|>assistant\n"
    plain = official.completions.create(model="demo-tools", prompt=prompt, max_tokens=20, temperature=0)
    assert text == plain.choices[0].text
    assert answer.choices[0].logprobs is not None
    told = answer.choices[0].logprobs.content
    assert told is not None
    assert "".join(token.token for token in told) == text
    assert all(token.logprob == token.top_logprobs[0].logprob for token in told)
    stream = official.chat.completions.create(
        model="demo-tools", messages=messages, max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
