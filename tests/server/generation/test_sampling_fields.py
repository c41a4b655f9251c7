"""Fields that the engine carries out: what of a body reaches it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine

from headway.engine import SamplingParams
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/completions"


async def submitted(client: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> SamplingParams:
    response = await client.post(URL, json={"prompt": "hello", **body})
    assert response.status_code == 200, response.text
    return engine.submitted[-1].sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.3), ("frequency_penalty", -0.5), ("presence_penalty", 2.0), ("min_tokens", 16),
        ("allowed_token_ids", [5, 7, 5]), ("temperature", 0.0), ("top_p", 0.5), ("top_k", 40), ("min_p", 0.05),
    ],
)  # fmt: skip
async def test_a_field_reaches_the_engine_under_its_name(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any
) -> None:
    assert getattr(await submitted(client, engine, **{field: value}), field) == value


async def test_biases_are_keyed_by_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    sampling = await submitted(client, engine, logit_bias={"7": 1.5, "599": -100})
    assert sampling.logit_bias == {7: 1.5, 599: -100}


async def test_a_bad_word_is_spelled_as_it_is_and_behind_a_space(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    sampling = await submitted(client, engine, bad_words=["fox", " dog"])
    spellings = ["fox", " fox", " dog"]
    assert sampling.bad_words_token_ids == [tokenizer.encode_plain(text) for text in spellings]


@pytest.mark.parametrize(
    ("body", "own", "prompt"),
    [
        ({}, None, None), ({"logprobs": 0}, 0, None), ({"logprobs": 5}, 5, None), ({"echo": True}, None, None),
        ({"logprobs": 2, "echo": True}, 2, 2), ({"best_of": 3}, 0, None), ({"best_of": 3, "n": 3}, None, None),
    ],
    ids=["none", "0", "5", "echo", "echo-2", "best-of", "best-of-n"],
)  # fmt: skip
async def test_logprobs_are_computed_only_where_they_are_needed(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], own: int | None, prompt: int | None
) -> None:
    sampling = await submitted(client, engine, **body)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (own, prompt)
