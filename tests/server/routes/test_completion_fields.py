"""What the fields of a completion beyond OpenAI's common ones do, over a FakeEngine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine

from headway.server.text.tokenizer import Tokenizer

URL = "/v1/completions"
TEXT = "the quick brown fox jumps over the lazy dog"


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hello", "seed": 1, "max_tokens": 50, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"prompt": "hello", "max_tokens": 50, "stream": True, **body})
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hello", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def both_ways(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The one choice of a whole answer, and the same put together from a stream."""
    whole = (await complete(client, **body))["choices"][0]
    parts = [part["choices"][0] for part in await chunks(client, **body) if part["choices"]]
    joined = {"text": "".join(part["text"] for part in parts)}
    if "token_ids" in parts[0]:
        joined["token_ids"] = [i for part in parts for i in part["token_ids"]]
    return [whole, joined | {"finish_reason": parts[-1]["finish_reason"]}]


@pytest.fixture
def fox(engine: FakeEngine, tokenizer: Tokenizer) -> list[int]:
    """The script of every request."""
    ids = tokenizer.encode(TEXT)
    engine.script = lambda request: ids
    return ids


async def test_stop_token_ids_end_the_text_beside_the_models_own(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, fox: list[int]
) -> None:
    for choice in await both_ways(client, stop_token_ids=[fox[2]]):
        assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(fox[:2]), "stop")
    await complete(client, stop_token_ids=[fox[2]], ignore_eos=True)
    own = list(tokenizer.stop_token_ids)
    assert [s.stop_token_ids for s in engine.submitted[1:]] == [sorted({*own, fox[2]}), [fox[2]]]


@pytest.mark.parametrize("tokens_per_round", [1, 2, 5])
async def test_include_stop_str_in_output_shows_what_ended_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, fox: list[int], tokens_per_round: int
) -> None:
    engine.tokens_per_round = tokens_per_round
    for choice in await both_ways(client, stop=["brown f"], include_stop_str_in_output=True):
        assert (choice["text"], choice["finish_reason"]) == ("the quick brown f", "stop")
    for choice in await both_ways(client, stop_token_ids=[fox[2]], include_stop_str_in_output=True):
        assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(fox[:3]), "stop")


async def test_skip_special_tokens_false_shows_them(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    end = tokenizer.stop_token_ids[0]
    engine.script = lambda request: [*tokenizer.encode("fox"), end, *tokenizer.encode(" dog")]
    for shows, expected in ((True, "fox dog"), (False, "fox<|endoftext|> dog")):
        for choice in await both_ways(client, ignore_eos=True, skip_special_tokens=shows):
            assert choice["text"] == expected


@pytest.mark.parametrize("tokens_per_round", [1, 2, 5])
async def test_token_ids_are_those_that_usage_counts(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, fox: list[int], tokens_per_round: int
) -> None:
    engine.tokens_per_round = tokens_per_round
    for choice in await both_ways(client, return_token_ids=True, max_tokens=4):
        assert choice["token_ids"] == fox[:4]
    for choice in await both_ways(client, return_token_ids=True, stop=["own fox"]):
        text = choice["text"]
        assert text == "the quick br"
        complete_at = next(i for i in range(len(fox)) if "own fox" in tokenizer.decode(fox[:i]))
        assert choice["token_ids"] == fox[:complete_at]
    end = tokenizer.stop_token_ids[0]
    engine.script = lambda request: [*fox, end]
    for choice in await both_ways(client, return_token_ids=True):
        assert (choice["token_ids"], choice["text"]) == ([*fox, end], TEXT)


async def test_tokens_of_a_split_character_come_with_the_character(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("a🦖b")
    engine.script = lambda request: ids
    engine.tokens_per_round = 1
    parts = [p["choices"][0] for p in await chunks(client, return_token_ids=True)]
    assert [tokenizer.decode(part["token_ids"]) for part in parts if part["text"]] == ["a", "🦖", "b"]


async def test_the_prompts_ids_come_once_a_choice(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    answer = await complete(client, return_token_ids=True, n=2)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids, ids]
    parts = [part["choices"][0] for part in await chunks(client, return_token_ids=True)]
    assert [part.get("prompt_token_ids") for part in parts] == [ids] + [None] * (len(parts) - 1)


async def test_token_ids_are_left_out_unless_asked_for(client: httpx.AsyncClient) -> None:
    assert set((await complete(client))["choices"][0]) == {
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
    }


async def test_the_engine_knows_the_request_by_the_name_that_its_client_does(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    given = {"x-request-id": "mine-1"}
    body = {"prompt": "a", "n": 2, "max_tokens": 1}
    for headers in (given, {}):
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert [submitted.label for submitted in engine.submitted[-2:]] == [
            response.headers["x-request-id"]
        ] * 2
    assert engine.submitted[0].label == "mine-1"


async def test_cache_salt_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, cache_salt="tenant 7")
    await complete(client)
    assert [submitted.cache_salt for submitted in engine.submitted] == ["tenant 7", ""]


async def test_truncate_prompt_tokens_keeps_the_last_ones(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    answer = await complete(client, prompt=TEXT, truncate_prompt_tokens=3, echo=True, max_tokens=1)
    assert engine.submitted[0].prompt_token_ids == ids[-3:]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == tokenizer.decode([*ids[-3:], ids[-3]])
    await complete(client, prompt=[7] * 300, truncate_prompt_tokens=100)
    await complete(client, prompt=TEXT, truncate_prompt_tokens=100)
    assert [s.prompt_token_ids for s in engine.submitted[1:]] == [[7] * 100, ids]


async def test_max_tokens_0_with_echo_gives_the_prompt_alone(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await complete(client, prompt=TEXT, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    (part,) = await chunks(client, prompt=TEXT, echo=True, max_tokens=0)
    assert part["choices"][0]["text"] == TEXT


async def test_max_tokens_0_never_stops_by_the_token_that_is_not_told(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = lambda request: [tokenizer.stop_token_ids[0]]
    for choice in await both_ways(client, prompt=TEXT, echo=True, max_tokens=0):
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")


async def test_continuous_usage_stats_tell_the_usage_so_far(client: httpx.AsyncClient) -> None:
    options = {"continuous_usage_stats": True}
    parts = await chunks(client, max_tokens=8, stream_options=options, ignore_eos=True)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert (len(set(counts)), counts[-1], parts[-1]["choices"]) == (3, 8, [])


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_report_tells_drafted_and_accepted_by_position(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.script = lambda request: [40] * 8  # rounds of 3, 3 and 2 tokens
    body = {"n": 2, "speculation": {"report": True}}
    answer = (await chunks(client, **body))[-1] if stream else await complete(client, **body)
    assert answer["speculation"] == {
        "max_draft_tokens": 3, "drafted_per_position": [6, 6, 6], "accepted_per_position": [6, 4, 0],
        "estimated_speedup": None,
    }  # fmt: skip
    engine.script = lambda request: []
    answer = await complete(client, speculation={"report": True, "max_draft_tokens": 9})
    assert answer["speculation"]["max_draft_tokens"] == 3


async def test_a_report_tells_the_speedup_over_all_choices(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Rounds of 4 ms gave tokens for which rounds without drafts would have taken 10 ms."""
    engine.estimated_seconds = 0.004, 0.010
    answer = await complete(client, n=2, speculation={"report": True})
    assert answer["speculation"]["estimated_speedup"] == pytest.approx(2.5)


async def test_no_report_unless_asked_for(client: httpx.AsyncClient) -> None:
    answer = await complete(client, speculation={"max_draft_tokens": 1})
    assert "speculation" not in answer
    assert "speculation" not in answer["choices"][0]


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("echo", [False, True], ids=["plain", "echo"])
async def test_draft_positions_tell_of_each_token_which_draft_it_was(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, echo: bool
) -> None:
    engine.script = lambda request: [40] * 8  # rounds of 3, 3 and 2 tokens, the last of each no draft
    engine.draft_start = 1  # as if each came with the token of a prefill
    body = {"prompt": TEXT, "echo": echo, "speculation": {"draft_positions": True}}
    parts = await chunks(client, **body) if stream else [await complete(client, **body)]
    told = [part["choices"][0]["speculation"] for part in parts]
    assert [i for entry in told for i in entry["draft_positions"]] == [0, 1, 0, 0, 1, 0, 0, 0]
    begin = len(TEXT) if echo else 0
    assert [i for entry in told for i in entry["text_offset"]] == list(range(begin, begin + 8))


async def test_draft_positions_of_the_best_begin_behind_the_echo_of_their_own_prompt(
    client: httpx.AsyncClient,
) -> None:
    wanted = {"best_of": 3, "n": 1, "echo": True, "max_tokens": 3, "logprobs": 0}
    answer = await complete(client, prompt=["a", TEXT], speculation={"draft_positions": True}, **wanted)
    for choice, prompt in zip(answer["choices"], ["a", TEXT], strict=True):
        offsets = choice["speculation"]["text_offset"]
        assert offsets[0] == len(prompt)
        assert offsets == choice["logprobs"]["text_offset"][-3:]


WRONG = [
    ("stop_token_ids", [600]), ("stop_token_ids", [-1]), ("stop_token_ids", list(range(65))),
    ("stop_token_ids", list(range(1, 65))), ("truncate_prompt_tokens", 0), ("cache_salt", ""), ("cache_salt", "x" * 257),
    ("suffix", "end"), ("top_k", 10**30), ("max_tokens", 10**30), ("max_tokens", 0),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{f}={str(v)[:12]}" for f, v in WRONG])
async def test_a_wrong_value_is_refused_by_name(client: httpx.AsyncClient, field: str, value: Any) -> None:
    error = await refusal(client, **{field: value})
    assert error["param"] == field
    assert field in error["message"]


NEUTRAL = {
    "response_format": {"type": "text"}, "store": False, "service_tier": "auto", "suffix": "",
    "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y",
}  # fmt: skip


@pytest.mark.parametrize("field", NEUTRAL)
async def test_values_that_change_nothing_are_accepted(client: httpx.AsyncClient, field: str) -> None:
    await complete(client, **{field: NEUTRAL[field]})
