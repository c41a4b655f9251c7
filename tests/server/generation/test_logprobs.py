"""Log-probabilities in answers: they belong to the tokens of the text that is sent, and to no others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_chat import FirstContent
from headway_testing.fake_engine import FakeEngine, fake_logprob
from tokenizers import Tokenizer as HFTokenizer

from headway.engine import TokenLogprobs
from headway.server.generation.choice import TokenInfo
from headway.server.generation.logprobs import completion_logprobs, prompt_tokens, token_name
from headway.server.requests.services import Services
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.prompt import EncodedPrompt
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/completions"
TEXT = "the quick brown fox jumps"


async def choice(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"prompt": "hello", "max_tokens": 50, "logprobs": 2, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The one choice of a stream, put together."""
    response = await client.post(
        URL, json={"prompt": "hello", "max_tokens": 50, "logprobs": 2, "stream": True, **body}
    )
    parts = [json.loads(e.removeprefix("data: "))["choices"][0] for e in response.text.split("\n\n")[:-2]]
    lists = {name: [x for part in parts for x in part["logprobs"][name]] for name in parts[0]["logprobs"]}
    return {"text": "".join(part["text"] for part in parts), "logprobs": lists}


def script(engine: FakeEngine, ids: list[int]) -> list[int]:
    engine.script = lambda request: ids
    return ids


async def test_a_token_has_name_value_rivals_and_place(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = script(engine, tokenizer.encode(TEXT))
    for found in (await choice(client), await streamed(client)):
        logprobs = found["logprobs"]
        names = [tokenizer.decode([i]) for i in ids]
        assert logprobs["tokens"] == names
        assert logprobs["token_logprobs"] == [fake_logprob(i) for i in ids]
        assert logprobs["text_offset"] == [len("".join(names[:i])) for i in range(len(ids))]
        rivals = {
            token_name(40, tokenizer.full_vocabulary): -0.5,
            token_name(41, tokenizer.full_vocabulary): -1.0,
        }
        assert logprobs["top_logprobs"] == [
            rivals | {n: fake_logprob(i)} for n, i in zip(names, ids, strict=True)
        ]


async def test_zero_rivals_leave_the_token_itself(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    script(engine, tokenizer.encode(TEXT))
    logprobs = (await choice(client, logprobs=0))["logprobs"]
    assert all(top == {name: value} for top, name, value in zip(
        logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True))  # fmt: skip


@pytest.mark.parametrize("tokens_per_round", [1, 2, 5])
async def test_tokens_that_a_stop_string_cut_away_are_told_at_the_end(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, tokens_per_round: int
) -> None:
    engine.tokens_per_round = tokens_per_round
    script(engine, tokenizer.encode(TEXT))
    for found in (await choice(client, stop=["own fox"]), await streamed(client, stop=["own fox"])):
        assert found["text"] == "the quick br"
        assert all(offset <= len(found["text"]) for offset in found["logprobs"]["text_offset"])
        assert "".join(found["logprobs"]["tokens"]).startswith("the quick brown fox")


async def test_pieces_of_a_character_are_named_by_their_bytes(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = script(engine, tokenizer.encode("a🦖b"))
    for found in (await choice(client), await streamed(client)):
        pieces = [n for n in found["logprobs"]["tokens"] if n.startswith("bytes:")]
        assert "".join(p.removeprefix("bytes:") for p in pieces) == "".join(
            f"\\x{b:02x}" for b in "🦖".encode()
        )
        assert len(found["logprobs"]["tokens"]) == len(ids)
        assert found["logprobs"]["text_offset"] == [0, *[1] * len(pieces), 2]


@pytest.mark.parametrize("prompt", [TEXT, [40, 41, 42], "x"], ids=["text", "ids", "one-token"])
async def test_an_echo_tells_the_prompts_tokens_first(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, prompt: Any
) -> None:
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids = script(engine, tokenizer.encode(" over"))
    for found in (
        await choice(client, prompt=prompt, echo=True),
        await streamed(client, prompt=prompt, echo=True),
    ):
        logprobs = found["logprobs"]
        assert found["text"] == tokenizer.decode([*prompt_ids, *ids])
        assert logprobs["token_logprobs"] == [None, *(fake_logprob(i) for i in [*prompt_ids[1:], *ids])]
        assert logprobs["top_logprobs"][0] is None
        for name, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert found["text"][start:].startswith(name)


async def test_a_prompt_is_scored_without_generating(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = await choice(client, prompt=TEXT, echo=True, max_tokens=0)
    assert found["text"] == TEXT
    assert len(found["logprobs"]["tokens"]) == len(engine.submitted[0].prompt_token_ids)


def test_a_token_put_before_the_text_has_no_place_in_it(tmp_path: Any) -> None:
    folder = tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_fallback())
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    text = "the fox 日本"
    ids = tokenizer.encode(text)
    tokens = prompt_tokens(EncodedPrompt(text, ids), TokenLogprobs(0, [-1.0] * (len(ids) - 1)), tokenizer)
    assert [token.start for token in tokens[:2]] == [0, 0]
    for token in tokens[1:]:
        name = token_name(token.token_id, tokenizer.full_vocabulary)
        assert name.startswith("bytes:") or text[token.start :].startswith(name.lstrip())


@pytest.mark.parametrize(
    "tokenizer", [tiny_tokenizers.byte_level(), tiny_tokenizers.byte_fallback()], ids=["byte-level", "byte-fallback"]
)  # fmt: skip
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer: HFTokenizer) -> None:
    vocabulary = Vocabulary(tokenizer, shows_special=True)
    text = "the quick  brown fox: naïve 😀"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(vocabulary.token_bytes(i) for i in ids).decode().strip() == text


def test_of_two_tokens_with_one_name_the_chosen_one_stays() -> None:
    vocabulary = Vocabulary(tiny_tokenizers.byte_level())
    token = TokenInfo(0, 0, -3.0, ((0, -1.0),))
    assert completion_logprobs([token], vocabulary).top_logprobs == [{"": -3.0}]


@pytest.mark.parametrize("n", [1, 2])
async def test_best_of_answers_the_likeliest_a_token(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, n: int
) -> None:
    texts = {0: [60] * 4, 1: [44] * 2, 2: [50] * 9, 3: [45, 45, 300]}
    engine.script = lambda request: texts[request.request_id % 4]
    response = await client.post(URL, json={"prompt": ["a", "b"], "n": n, "best_of": 4, "max_tokens": 20})
    answer = response.json()
    found = [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]]
    best = [tokenizer.decode(texts[i]) for i in (1, 2)][:n] * 2
    assert found == [(i, text, None) for i, text in enumerate(best)]
    assert answer["usage"]["completion_tokens"] == 2 * (4 + 2 + 9 + 3)


@pytest.mark.parametrize(
    "body", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}], ids=["few", "stream"]
)
async def test_best_of_that_cannot_be_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post(URL, json={"prompt": "a", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


class TestChat:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return Services("tiny", services.engine, services.tokenizer, services.metrics, FirstContent())

    @pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
    async def test_a_token_is_an_object_with_its_bytes(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
    ) -> None:
        ids = script(engine, tokenizer.encode("naïve 🦖"))
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 1,
            "stream": stream,
        }
        text = (await client.post("/v1/chat/completions", json=body)).text
        events = (
            [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
            if stream
            else [json.loads(text)]
        )
        content = [t for e in events for t in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert bytes(b for token in content for b in token["bytes"]).decode() == "naïve 🦖"
        assert [token["logprob"] for token in content] == [fake_logprob(i) for i in ids]
        rival = tokenizer.vocabulary.token_bytes(40)
        assert content[0]["top_logprobs"] == [
            {"token": rival.decode(errors="replace"), "logprob": -0.5, "bytes": [*rival]}
        ]
