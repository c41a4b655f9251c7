"""What ends a text, as clients read it over HTTP: its entry in the log-probabilities, its place in the text,
its name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import FirstContent
from headway_testing.fake_engine import FakeEngine, fake_logprob
from headway_testing.tiny_tokenizers import END_OF_TEXT

from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

PROMPT = "the quick brown fox"
CONTINUATION = " jumps over"
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])


@pytest.fixture
def services(services: Services) -> Services:
    return Services("tiny", services.engine, services.tokenizer, services.metrics, FirstContent())


@pytest.fixture
def end(tokenizer: Tokenizer) -> int:
    return tokenizer.stop_token_ids[0]


async def answer(client: httpx.AsyncClient, *, stream: bool, **body: Any) -> dict[str, Any]:
    """The whole answer of /v1/completions, or the same put together from its stream."""
    body = {"max_tokens": 50, "stream": stream} | body
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()
    *parts, last = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]
    choices: dict[int, dict[str, Any]] = {}
    for piece in (piece for part in parts for piece in part["choices"]):
        told = choices.setdefault(piece["index"], {"text": "", "logprobs": {name: [] for name in FIELDS}})
        told["text"] += piece["text"]
        for name in FIELDS if piece["logprobs"] else ():
            told["logprobs"][name] += piece["logprobs"][name]
        told |= {name: piece.get(name) for name in ("index", "finish_reason", "stop_reason")}
    return {"choices": [choices[i] for i in sorted(choices)], "usage": last["usage"]}


@both_ways
@pytest.mark.parametrize("ending", ["end", "end-shown", "end-ignored", "text", "stop-id", "stop-string"])
async def test_an_echo_has_an_entry_for_every_token_that_usage_counts(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, end: int, stream: bool, ending: str
) -> None:
    """As lm-eval asks: of a text and its continuation, and of one token more, whose entry it drops unseen."""
    context, whole = tokenizer.encode(PROMPT), tokenizer.encode(PROMPT + CONTINUATION)
    last = tokenizer.encode("x")[0] if ending in ("text", "stop-id", "stop-string") else end
    engine.script = lambda request: [last]
    wishes: dict[str, dict[str, Any]] = {
        "end-shown": {"skip_special_tokens": False, "include_stop_str_in_output": True},
        "end-ignored": {"ignore_eos": True},
        "stop-id": {"stop_token_ids": [last]},
        "stop-string": {"stop": ["x"]},
    }
    body = {"prompt": [whole, whole], "max_tokens": 1, "echo": True, "logprobs": 1}
    told = await answer(client, stream=stream, **body, **wishes.get(ending, {}))
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 * len(whole), 2)
    for choice in told["choices"]:
        logprobs = choice["logprobs"]
        assert {len(logprobs[name]) for name in FIELDS} == {len(whole) + 1}
        scored = logprobs["token_logprobs"][len(context) : -1]
        assert scored == [fake_logprob(token_id) for token_id in whole[len(context) :]]
        assert logprobs["token_logprobs"][-1] == fake_logprob(last)
        text = PROMPT + CONTINUATION + {"text": "x", "end-shown": END_OF_TEXT}.get(ending, "")
        assert choice["text"] == text
        assert logprobs["text_offset"][-1] == len(PROMPT + CONTINUATION)


@both_ways
@pytest.mark.parametrize("tokens_per_round", [1, 2, 5])
@pytest.mark.parametrize("shows_stop", [False, True], ids=["hidden", "shown"])
async def test_a_stop_string_that_is_a_special_token_ends_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, end: int, stream: bool,
    tokens_per_round: int, shows_stop: bool,
) -> None:  # fmt: skip
    """With ignore_eos it is a special token like others: the engine does not stop there."""
    engine.tokens_per_round = tokens_per_round
    ids = tokenizer.encode(PROMPT)
    engine.script = lambda request: [*ids, end, *ids]
    told = await answer(
        client, stream=stream, prompt="x", ignore_eos=True, stop=["never", END_OF_TEXT], logprobs=0,
        include_stop_str_in_output=shows_stop,
    )  # fmt: skip
    (choice,) = told["choices"]
    assert choice["text"] == PROMPT + (END_OF_TEXT if shows_stop else "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", END_OF_TEXT)
    assert told["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == len(ids) + 1


STOP_REASONS = {
    "string": ({"stop": ["zzz", "brown f"]}, "stop", "brown f"),
    "longest-of-two": ({"stop": ["own", "brown"]}, "stop", "brown"),
    "special-token": ({"stop": [END_OF_TEXT], "ignore_eos": True}, "stop", END_OF_TEXT),
    "own-end": ({}, "stop", None),
    "own-end-named": ({"stop_token_ids": [0]}, "stop", None),
    "length": ({"stop": ["zzz"], "max_tokens": 2}, "length", None),
}


@both_ways
@pytest.mark.parametrize(("body", "finish_reason", "stop_reason"), STOP_REASONS.values(), ids=STOP_REASONS)
async def test_stop_reason_names_what_ended_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, end: int, stream: bool,
    body: dict[str, Any], finish_reason: str, stop_reason: str | None,
) -> None:  # fmt: skip
    engine.script = lambda request: [*tokenizer.encode(PROMPT), end]
    (completion,) = (await answer(client, stream=stream, prompt="x", **body))["choices"]
    assert (completion["finish_reason"], completion["stop_reason"]) == (finish_reason, stop_reason)
    asked = {"messages": [{"role": "user", "content": "x"}], "stream": stream, **body}
    response = await client.post("/v1/chat/completions", json=asked)
    last = response.text.split("\n\n")[-3].removeprefix("data: ") if stream else response.text
    chat = json.loads(last)["choices"][0]
    assert (chat["finish_reason"], chat["stop_reason"]) == (finish_reason, stop_reason)


@both_ways
async def test_stop_reason_is_the_id_that_the_client_named(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode(PROMPT)
    engine.script = lambda request: ids
    (choice,) = (await answer(client, stream=stream, prompt="x", stop_token_ids=[ids[2]]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[2])
