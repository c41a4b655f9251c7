"""What the engine refuses of a request: with the field, the value and the limit, before anything is done."""

from __future__ import annotations

import math

import msgspec
import pytest

from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.sampling_params import SamplingParams, ThinkingBudget
from headway.engine.scheduling.limits import MAX_BAD_WORDS, Limits
from headway.engine.scheduling.request import Request

LIMITS = Limits(max_model_len=64, vocab_size=100)


def request(prompt: tuple[int, ...] = (1, 2), stop: tuple[int, ...] = (), **sampling: object) -> Request:
    params = msgspec.structs.replace(SamplingParams(), **sampling)
    return Request(0, list(prompt), params, max_tokens=4, stop_token_ids=frozenset(stop))


REFUSED: dict[str, tuple[Request, str, str]] = {
    "empty prompt": (request(()), "prompt", "0 tokens"),
    "prompt id": (request((1, 100)), "prompt", "token id 100, it may have 0 to 99"),
    "negative prompt id": (request((-1, 99)), "prompt", "token id -1"),
    "65 stop ids": (request(stop=tuple(range(65))), "stop_token_ids", "65 ids, it may have 64"),
    "stop id": (request(stop=(100,)), "stop_token_ids", "token id 100"),
    "temperature": (request(temperature=-0.1), "temperature", "is -0.1, it must be 0 or more"),
    "temperature inf": (request(temperature=math.inf), "temperature", "is inf"),
    "temperature nan": (request(temperature=math.nan), "temperature", "is nan"),
    "top_k": (request(top_k=-1), "top_k", "is -1"),
    "top_k beyond int64": (request(top_k=1 << 63), "top_k", "is 9223372036854775808"),
    "top_p": (request(top_p=0.0), "top_p", "is 0.0, it must be above 0 and at most 1"),
    "min_p": (request(min_p=1.1), "min_p", "is 1.1"),
    "seed": (request(seed=1 << 64), "seed", "must be 64 bits"),
    "repetition_penalty": (request(repetition_penalty=0.0), "repetition_penalty", "is 0.0"),
    "frequency_penalty": (request(frequency_penalty=2.1), "frequency_penalty", "is 2.1, it must be -2 to 2"),
    "presence_penalty": (request(presence_penalty=math.nan), "presence_penalty", "is nan"),
    "logit_bias id": (request(logit_bias={100: 1.0}), "logit_bias", "token id 100"),
    "logit_bias value": (request(logit_bias={5: -101.0}), "logit_bias", "is -101.0 for token id 5"),
    "logit_bias nan": (request(logit_bias={5: math.nan}), "logit_bias", "is nan"),
    "allowed id": (request(allowed_token_ids=[3, -2]), "allowed_token_ids", "token id -2"),
    "allowed none": (request(allowed_token_ids=[]), "allowed_token_ids", "is empty"),
    "bad word id": (request(bad_words_token_ids=[[1], [2, 100]]), "bad_words", "token id 100"),
    "bad word empty": (request(bad_words_token_ids=[[]]), "bad_words", "one of 0 tokens"),
    "bad word long": (request(bad_words_token_ids=[[1] * 17]), "bad_words", "17 tokens, it may have 1 to 16"),
    "bad words": (request(bad_words_token_ids=[[1]] * (MAX_BAD_WORDS + 1)), "bad_words", "257 token seq"),
    "min_tokens": (request(min_tokens=-1), "min_tokens", "is -1"),
    "thinking budget": (request(thinking_budget=ThinkingBudget(-1, 3)), "thinking_budget_tokens", "is -1"),
    "thinking budget id": (
        request(thinking_budget=ThinkingBudget(5, 100)),
        "thinking_budget_tokens",
        "token id 100",
    ),
    "thinking budget opener": (
        request(thinking_budget=ThinkingBudget(5, 3, 100)),
        "thinking_budget_tokens",
        "token id 100",
    ),
    "logprobs": (request(num_logprobs=21), "logprobs", "is 21, it must be 0 to 20"),
    "prompt logprobs": (request(num_prompt_logprobs=-1), "prompt_logprobs", "is -1"),
    "all allowed are bad": (
        request(allowed_token_ids=[3, 4, 3], bad_words_token_ids=[[3], [9, 4]]),
        "allowed_token_ids",
        "no token is left",
    ),
    "all allowed are stops": (
        request(stop=(3,), allowed_token_ids=[3], min_tokens=1),
        "allowed_token_ids",
        "no token is left",
    ),
    "all are bad": (request(bad_words_token_ids=[[i] for i in range(100)]), "bad_words", "no token is left"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_field_and_value(name: str) -> None:
    refused, param, words = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        LIMITS.check(refused)
    assert words in str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


ACCEPTED: dict[str, Request] = {
    "defaults": request(),
    "last id everywhere": request(
        (99,), (99,), logit_bias={99: 100.0}, allowed_token_ids=[98, 99], bad_words_token_ids=[[99] * 16]
    ),
    "64 stop ids": request(stop=tuple(range(64)), min_tokens=1 << 40),
    "seeds of 64 bits": request(seed=(1 << 64) - 1),
    "negative seeds": request(seed=-(1 << 63)),
    "penalties at their ends": request(
        repetition_penalty=100.0, frequency_penalty=-2.0, presence_penalty=2.0
    ),
    "20 logprobs": request(num_logprobs=20, num_prompt_logprobs=0),
    "stops masked, one other allowed": request(stop=(3,), allowed_token_ids=[3, 4], min_tokens=9),
    "a thinking budget of nothing": request(thinking_budget=ThinkingBudget(0, 99)),
    "a thinking budget without an end": request(thinking_budget=ThinkingBudget(1 << 40, 0)),
    "only a stop allowed": request(stop=(3,), allowed_token_ids=[3]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_lies_on_a_limit_is_accepted(name: str) -> None:
    LIMITS.check(ACCEPTED[name])


def test_a_prompt_may_fill_the_context_only_where_one_token_is_generated() -> None:
    LIMITS.check(Request(0, [1] * 64, SamplingParams(), max_tokens=1))
    for length, max_tokens in ((64, 2), (65, 1)):
        with pytest.raises(RequestError, match=f"prompt has {length} tokens") as caught:
            LIMITS.check(Request(0, [1] * length, SamplingParams(), max_tokens=max_tokens))
        assert caught.value.code == "context_length_exceeded"
