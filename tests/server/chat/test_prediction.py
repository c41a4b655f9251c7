"""`prediction` of chats by the official client: what reaches the engine, and what `usage` says of it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from headway_testing.fake_chat import FakeChat
from headway_testing.fake_engine import INFO, FakeEngine

from headway.engine import Submit
from headway.engine.protocol.drafters import DrafterName
from headway.server.app import create_app
from headway.server.base.conversation import Conversation
from headway.server.generation.prediction import PredictionUse
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ANSWER = "the quick brown fox jumps over the lazy dog and the quick brown cat"
PREDICTED = "the quick red fox jumps over the lazy dog and the quick brown cat"


class PlainChat(FakeChat):
    async def render(self, conversation: Conversation) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in conversation.messages) + "assistant: "


@pytest.fixture
def services(services: Services) -> Services:
    return replace(services, chat=PlainChat())


@pytest.fixture
def submitted(engine: FakeEngine, tokenizer: Tokenizer) -> list[Submit]:
    """What the engine is asked for; it answers with ANSWER."""
    ids, found = tokenizer.encode_plain(ANSWER), []

    def script(request: Submit) -> list[int]:
        found.append(request)
        return ids

    engine.script = script
    return found


@pytest.fixture
def official(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://headway/v1", http_client=client)


@pytest.mark.parametrize(
    "content", [PREDICTED, [{"type": "text", "text": PREDICTED[:9]}, {"type": "text", "text": PREDICTED[9:]}]]
)
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_sums_to_the_prediction(
    content: Any, n: int, official: openai.AsyncOpenAI, submitted: list[Submit], tokenizer: Tokenizer
) -> None:
    answer = await official.chat.completions.create(
        model="tiny", messages=HELLO, n=n, prediction={"type": "content", "content": content}
    )
    ids = tokenizer.encode_plain(PREDICTED)
    assert [request.prediction_token_ids for request in submitted] == [ids] * n
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == n * len(ids)
    assert 0 < details.rejected_prediction_tokens < n * len(ids) / 2


async def test_a_stream_tells_the_same(official: openai.AsyncOpenAI, submitted: list[Submit]) -> None:
    usages = []
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        stream = await official.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options=options,  # type: ignore[call-overload]
            prediction={"type": "content", "content": PREDICTED},
        )  # fmt: skip
        usages.append([chunk.usage async for chunk in stream])
    whole, running = usages
    assert whole[-1] == running[-1] == running[-2]
    counts = [usage.completion_tokens_details.accepted_prediction_tokens for usage in running]
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("drafter", "told"), [("ngram", None), ("mtp,ngram", None), ("mtp", "prediction"), ("none", "prediction")]
)
async def test_a_server_that_does_not_search_it_says_so(
    drafter: DrafterName, told: str | None, services: Services
) -> None:
    engine = FakeEngine(msgspec.structs.replace(INFO, drafter=drafter))
    app = create_app(replace(services, engine=engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        body = {"messages": HELLO, "prediction": {"type": "content", "content": PREDICTED}}
        response = await client.post(URL, json=body)
    assert response.status_code == 200
    assert response.headers.get("x-headway-ignored") == told


async def test_without_a_prediction_usage_counts_drafts(
    official: openai.AsyncOpenAI, submitted: list[Submit]
) -> None:
    answer = await official.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"speculation": {"report": True}}
    )
    assert submitted[0].prediction_token_ids == []
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    report = answer.model_extra["speculation"]  # type: ignore[index]
    assert details is not None
    assert details.accepted_prediction_tokens == sum(report["accepted_per_position"])


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "file", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "prediction.content[0].type"),
    ],
)  # fmt: skip
async def test_what_is_no_text_is_refused_by_name(
    prediction: dict[str, Any], param: str, client: httpx.AsyncClient, submitted: list[Submit]
) -> None:
    response = await client.post(URL, json={"messages": HELLO, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not submitted


def accepted(predicted: list[int], output: list[int]) -> int:
    use = PredictionUse(predicted)
    use.take(output)
    assert use.finish() + use.num_accepted == len(predicted)
    return use.num_accepted


def edited(draw: random.Random, text: list[int]) -> tuple[list[int], int]:
    """A text with three stretches replaced by new tokens, and the number of tokens that stayed."""
    cuts = sorted(draw.sample(range(20, len(text) - 20, 30), 3), reverse=True)
    stayed, text = len(text), list(text)
    for cut in cuts:
        text[cut : cut + 5] = range(10_000 + cut, 10_000 + cut + draw.randrange(9))
        stayed -= 5
    return text, stayed


@pytest.mark.parametrize("seed", range(20))
def test_all_but_the_first_token_after_an_edit_is_accepted(seed: int) -> None:
    draw = random.Random(seed)
    predicted = [draw.randrange(1000) for _ in range(400)]
    output, stayed = edited(draw, predicted)
    assert accepted(predicted, predicted) == 400
    assert stayed - 8 <= accepted(predicted, output) <= stayed


def test_no_token_is_accepted_twice_and_a_wrong_prediction_never() -> None:
    assert accepted([1, 2, 3], [1, 2, 3] * 5) == 3
    assert accepted([1, 2, 3], [4, 5, 6]) == 0
    assert accepted([], [1]) == 0


def test_a_prediction_of_few_ids_takes_no_quadratic_time() -> None:
    """The places of a token are not walked: the event loop would wait for 256 million comparisons."""
    start = time.thread_time()
    accepted([7, 8] * 8000, [7] * 16000)
    assert time.thread_time() - start < 5
