"""POST /v1/completions over a FakeEngine: shapes, order, limits, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.tiny_tokenizers import END_OF_TEXT

from headway.engine import FinishReason, SamplingParams, TokenEvent
from headway.server.base.config import ServiceLimits
from headway.server.generation.generation import choice_seed
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/completions"
MAX_BODY_BYTES = ServiceLimits().max_body_bytes


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hello", "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, status: int = 400, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hello", **body})
    assert response.status_code == status, response.text
    return envelope(response)


def envelope(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_a_completion_has_the_shape_of_openai(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = await complete(client, prompt="the quick brown", max_tokens=5)
    ids = tokenizer.encode("the quick brown")
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    text = tokenizer.decode((ids * 5)[:5])
    assert answer["choices"] == [
        {"text": text, "index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 5, "total_tokens": len(ids) + 5,
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 3},
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


async def test_max_tokens_is_16_by_default(client: httpx.AsyncClient) -> None:
    assert (await complete(client))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("hello", 1), (["hello", "world"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
    ids=["string", "strings", "ids", "lists-of-ids"],
)
async def test_choices_come_in_the_order_of_prompts_then_n(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, prompt: Any, num_prompts: int
) -> None:
    answer = await complete(client, prompt=prompt, n=2, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    prompts = [submitted.prompt_token_ids for submitted in engine.submitted]
    assert prompts[::2] == prompts[1::2]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [tokenizer.decode((ids * 4)[:4]) for ids in prompts]


async def test_choice_j_uses_hash_of_seed_and_j_whatever_the_other_prompts(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt=["a", "b"], n=2, seed=-1)
    seeds = [submitted.sampling.seed for submitted in engine.submitted]
    assert seeds == [choice_seed(2**64 - 1, 0), choice_seed(2**64 - 1, 1)] * 2
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_without_a_seed_every_prompt_draws_its_own(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt=["same", "same"], seed=None)
    await complete(client, prompt="same", seed=None)
    assert len({submitted.sampling.seed for submitted in engine.submitted}) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("prompt", ["def f", [40, 41, 42]], ids=["string", "ids"])
async def test_echo_puts_the_prompt_in_front(
    client: httpx.AsyncClient, tokenizer: Tokenizer, prompt: Any, stream: bool
) -> None:
    response = await client.post(
        URL, json={"prompt": prompt, "echo": True, "max_tokens": 2, "stream": stream}
    )
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    text = "".join(c["text"] for chunk in chunks(response) for c in chunk["choices"])
    assert text == tokenizer.decode(ids + ids[:2])


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event of a stream; of the one body of an answer that is no stream."""
    if response.headers["content-type"].startswith("application/json"):
        return [response.json()]
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_stream_says_the_same_as_one_answer(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["日本語 😀", "naïve café"], "n": 2, "max_tokens": 30, "seed": 3}
    whole = (await client.post(URL, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = chunks(await client.post(URL, json={**body, **options}))
    texts, reasons = [""] * 4, [None] * 4
    for part in parts:
        assert part["usage"] is None
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({part["id"] for part in [*parts, last]}) == 1


async def test_a_stream_has_no_usage_unless_asked(client: httpx.AsyncClient) -> None:
    parts = chunks(await client.post(URL, json={"prompt": "a", "stream": True}))
    assert all("usage" not in part for part in parts)


@pytest.mark.parametrize("tokens_per_round", [1, 2, 5])
@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_stop_string_cuts_exactly_and_aborts(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, stream: bool, tokens_per_round: int
) -> None:
    engine.tokens_per_round = tokens_per_round
    engine.script = lambda request: tokenizer.encode("the quick brown fox jumps over the lazy dog")
    body = {"prompt": "x", "max_tokens": 50, "stop": ["brown f", "lazy"], "stream": stream}
    parts = chunks(await client.post(URL, json=body))
    assert "".join(part["choices"][0]["text"] for part in parts) == "the quick "
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == [0]


async def test_an_end_token_stops_is_counted_and_not_shown(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    end = tokenizer.stop_token_ids[0]
    engine.script = lambda request: [*tokenizer.encode("fox"), end, *tokenizer.encode("dog")]
    answer = await complete(client, max_tokens=50)
    assert answer["choices"][0]["text"] == "fox"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(tokenizer.encode("fox")) + 1


async def test_ignore_eos_sends_no_stop_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, ignore_eos=True)
    await complete(client)
    assert [bool(submitted.stop_token_ids) for submitted in engine.submitted] == [False, True]


async def test_sampling_and_depth_cap_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1}
    await complete(client, **wanted, speculation={"max_draft_tokens": 0})
    submitted = engine.submitted[0]
    seed = choice_seed(1, 0)
    assert submitted.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=seed)
    assert submitted.max_draft_tokens == 0


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
async def test_a_body_is_json_whatever_its_content_type(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    response = await client.post(URL, content=b'{"prompt":"def f","max_tokens":3}', headers=headers)
    assert response.status_code == 200


async def test_an_empty_prompt_is_the_token_that_starts_a_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    await complete(client, prompt="")
    assert engine.submitted[0].prompt_token_ids == [tokenizer.vocabulary.tokenizer.token_to_id(END_OF_TEXT)]


NEUTRAL = {
    "best_of": 1, "min_tokens": 0, "bad_words": [], "repetition_penalty": 1, "suffix": None, "logprobs": None, "logit_bias": {}, "presence_penalty": 0,
    "frequency_penalty": 0.0, "user": "me", "model": "tiny", "n": None, "stop": None, "stream_options": None,
}  # fmt: skip


@pytest.mark.parametrize("field", NEUTRAL)
async def test_neutral_values_are_accepted(client: httpx.AsyncClient, field: str) -> None:
    await complete(client, **{field: NEUTRAL[field]})


WRONG = [
    ("n", 0), ("n", 129), ("n", "2"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5),
    ("max_tokens", True), ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0),
    ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("seed", 2**64), ("stream", 0), ("stream", "yes"),
    ("stop", ["a"] * 17), ("stop", ""), ("stop", [1]), ("stop", "x" * 1025), ("prompt", []), ("prompt", [[]]),
    ("prompt", ["a", 1]), ("prompt", {}), ("prompt", None), ("prompt", [600]), ("prompt", [-1]),
    ("prompt", [[1], [10**30]]), ("best_of", 0), ("best_of", 129), ("suffix", "x"), ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 101),
    ("logit_bias", {"1": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"600": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
    ("logit_bias", {"\u0665": 1}), ("logit_bias", {"5": 100, "05": -100}),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("min_tokens", -1), ("min_tokens", 17), ("allowed_token_ids", []),
    ("allowed_token_ids", [600]), ("bad_words", [""]), ("bad_words", ["x" * 257]), ("bad_words", ["xqzj" * 20]), ("bad_words", ["a"] * 129),
    ("stream_options", {"include_usage": True}), ("prompts", 1), ("echo", 1), ("speculation", 3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{f}={str(v)[:12]}" for f, v in WRONG])
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any
) -> None:
    error = await refusal(client, **{field: value})
    assert error["param"].split("[")[0] == field
    assert field in error["message"] or "prompt" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


async def test_a_body_without_a_prompt_is_told_so(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"max_tokens": 3})
    assert response.status_code == 400
    error = envelope(response)
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_a_wrong_inner_field_is_named_with_its_path(client: httpx.AsyncClient) -> None:
    error = await refusal(client, speculation={"max_draft_tokens": -1})
    assert error["param"] == "speculation.max_draft_tokens"
    error = await refusal(client, stream=True, stream_options={"include_usages": True})
    assert (error["param"], error["code"]) == ("stream_options.include_usages", "unknown_parameter")
    assert error["message"].startswith(
        "Unrecognized request argument supplied: stream_options.include_usages; "
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"temperature":NaN}'],
    ids=["empty", "cut", "list", "not-utf8", "string-not-utf8", "lone-surrogate", "nan"],
)  # fmt: skip
async def test_a_body_that_is_not_json_is_a_400_in_the_envelope(
    client: httpx.AsyncClient, body: bytes
) -> None:
    response = await client.post(URL, content=body)
    assert response.status_code == 400
    envelope(response)


async def test_too_large_a_body_is_413(client: httpx.AsyncClient) -> None:
    async def parts():
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    announced = await client.post(URL, content=b" " * (MAX_BODY_BYTES + 1))
    unannounced = await client.post(URL, content=parts())
    for response in (announced, unannounced):
        assert response.status_code == 413
        assert str(MAX_BODY_BYTES) in envelope(response)["message"]


async def test_the_wrong_model_is_404(client: httpx.AsyncClient) -> None:
    error = await refusal(client, 404, model="gpt-4")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_message_repeats_little_of_a_long_value_and_keeps_its_end(client: httpx.AsyncClient) -> None:
    message = (await refusal(client, 404, model="x" * 50_000))["message"]
    assert len(message) < 2100
    assert message.startswith("The model 'xxx")
    assert message.endswith("this server serves 'tiny'")


async def test_an_empty_body_is_named_so(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, content=b" ")
    assert (response.status_code, envelope(response)["code"]) == (400, "invalid_json")
    assert envelope(response)["message"] == "the body is empty; send a JSON object"


async def test_a_prompt_over_the_context_is_context_length_exceeded(client: httpx.AsyncClient) -> None:
    error = await refusal(client, prompt=[1] * INFO.max_model_len)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "257" in error["message"]


async def test_max_tokens_beyond_the_context_is_refused_when_given_and_cut_when_not(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    error = await refusal(client, prompt=[1] * 250, max_tokens=7)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    await complete(client, prompt=[1] * 250, max_tokens=6)
    await complete(client, prompt=[1] * 250)
    assert [submitted.max_tokens for submitted in engine.submitted] == [6, 6]


async def test_a_long_prompt_is_refused_without_choking(client: httpx.AsyncClient) -> None:
    error = await refusal(client, prompt="word " * 20_000)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["word " * 20_000, ["a", "word " * 20_000]], ids=["one", "second-of-two"])
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompt: str | list[str]
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    error = await refusal(client, prompt=prompt)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "or more" in error["message"]


async def test_a_prompt_that_is_to_be_cut_may_be_longer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt="word " * 20_000, truncate_prompt_tokens=7, max_tokens=1)
    assert len(engine.submitted[0].prompt_token_ids) == 7


async def test_too_many_choices_are_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, prompt=[[1]] * 65, n=8)
    assert "520" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_full_queue_is_429_with_retry_after(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.refusal = TokenEvent(0, [], FinishReason.ERROR, error="1,024 wait", error_code="queue_full")
    response = await client.post(URL, json={"prompt": "a", "stream": stream, "n": 2})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert envelope(response)["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("state", ["loading", "restarting", "stopped"])
async def test_an_engine_that_does_not_serve_is_503(
    client: httpx.AsyncClient, engine: FakeEngine, state: Any, stream: bool
) -> None:
    engine.state = state
    response = await client.post(URL, json={"prompt": "a", "stream": stream})
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert state in envelope(response)["message"]


async def test_a_model_that_never_loaded_is_503(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info, engine.state = None, "loading"
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 503


async def test_an_engine_that_dies_is_503_for_a_whole_answer(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.die_after = 6
    response = await client.post(URL, json={"prompt": "a", "max_tokens": 20})
    assert response.status_code == 503
    assert "ended" in envelope(response)["message"]


async def test_an_engine_that_dies_in_a_stream_sends_an_error_event_and_ends_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.die_after = 6
    response = await client.post(URL, json={"prompt": "a", "max_tokens": 20, "stream": True})
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"


async def test_a_fault_of_our_own_is_500_in_the_envelope(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = lambda request: 1 / 0  # type: ignore[return-value]
    engine.submit = lambda requests: 1 / 0  # type: ignore[method-assign]
    response = await client.post(URL, json={"prompt": "a"})
    assert response.status_code == 500
    assert envelope(response)["type"] == "internal_error"
    assert "division" not in response.text


async def test_a_fault_of_the_engine_on_one_request_is_500_with_its_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fault = TokenEvent(
        0, [], FinishReason.ERROR, error="it failed; others do not", error_code="internal_error"
    )
    engine.refusal = fault
    error = await refusal(client, 500)
    assert (error["message"], error["type"]) == ("it failed; others do not", "internal_error")


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_the_engines_refusal_names_the_field(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.refusal = TokenEvent(
        0, [], FinishReason.ERROR, error="no", error_code="invalid_value", error_param="min_p"
    )
    error = await refusal(client, stream=stream)
    assert (error["message"], error["code"], error["param"]) == ("no", "invalid_value", "min_p")


@pytest.mark.parametrize("value", [0, 1.1, -1])
async def test_the_range_of_top_p_is_told_as_it_is(client: httpx.AsyncClient, value: float) -> None:
    error = await refusal(client, top_p=value)
    assert error["message"] == f"top_p is {float(value)}, it must be above 0, at most 1"
