"""`suffix`: gaps are filled by the model's own tokens, which no text of a client becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from transformers import PreTrainedTokenizerFast

from headway.server.app import create_app
from headway.server.requests.services import Services
from headway.server.text.fim import FAMILIES, find_fim
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/completions"
QWEN = FAMILIES["Qwen2.5-Coder, CodeGemma"]
LLAMA = FAMILIES["Code Llama"]


def byte_level() -> HFTokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    names = [QWEN.prefix, QWEN.suffix, QWEN.middle, "<|fim_pad|>", "<|repo_name|>"]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def code_llama(*, has_metaspace: bool) -> HFTokenizer:
    tokenizer = tiny_tokenizers.byte_fallback()
    if has_metaspace:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    names = [LLAMA.prefix, LLAMA.suffix, LLAMA.middle, *LLAMA.ends]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.save(tmp_path_factory.mktemp("fim"), byte_level()))


@pytest.fixture
def services(services: Services, gaps: Tokenizer) -> Services:
    return Services("tiny", services.engine, gaps, services.metrics)


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.vocabulary.tokenizer.id_to_token(i) for i in ids]


async def completed(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"max_tokens": 3, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_a_gap_is_between_the_tokens_of_the_model(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """By transformers, to which the tokens are written out, as the model's authors show it."""
    prefix, suffix = "def f(x):\n    return ", "\n\nprint(f(日本))"
    await completed(client, prompt=prefix, suffix=suffix)
    written = f"{QWEN.prefix}{prefix}{QWEN.suffix}{suffix}{QWEN.middle}"
    expected = PreTrainedTokenizerFast(tokenizer_object=byte_level())(written)["input_ids"]
    assert engine.submitted[0].prompt_token_ids == expected


async def test_each_prompt_of_a_list_gets_the_suffix_and_ids_are_taken_as_they_are(
    client: httpx.AsyncClient, engine: FakeEngine, gaps: Tokenizer
) -> None:
    await completed(client, prompt=["a", "", "b "], suffix="\nz")
    texts = [gaps.full_vocabulary.decode(submitted.prompt_token_ids) for submitted in engine.submitted]
    assert texts == [f"{QWEN.prefix}{text}{QWEN.suffix}\nz{QWEN.middle}" for text in ("a", "", "b ")]
    strings = [submitted.prompt_token_ids for submitted in engine.submitted]
    engine.submitted.clear()
    await completed(client, prompt=[gaps.encode_plain(text) for text in ("a", "b ")], suffix="\nz")
    assert [submitted.prompt_token_ids for submitted in engine.submitted] == [strings[0], strings[2]]


PIECES = st.lists(
    st.sampled_from([QWEN.prefix, QWEN.suffix, QWEN.middle, "<|fim_", "prefix|>", "middle|>", "x", " ", "\n", "日本"]), max_size=6
).map("".join)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=200)
@given(prefix=PIECES, suffix=PIECES)
def test_no_text_of_a_client_becomes_such_a_token(gaps: Tokenizer, prefix: str, suffix: str) -> None:
    fim = gaps.fim
    assert fim is not None
    before, after = fim.encode_before(prefix), fim.encode_after(suffix)
    own = {fim.prefix_id, fim.suffix_id, fim.middle_id}
    assert not own & set(before)
    assert [i for i in after if i in own] == [after[0], after[-1]] == [fim.suffix_id, fim.middle_id]
    assert gaps.full_vocabulary.decode(before) == prefix
    assert gaps.full_vocabulary.decode(after[1:-1]) == suffix


async def test_other_special_tokens_of_a_prompt_are_tokens_as_ever(
    client: httpx.AsyncClient, engine: FakeEngine, gaps: Tokenizer
) -> None:
    await completed(client, prompt="<|repo_name|>lib\n", suffix="<|endoftext|>x")
    found = [name for name in names(gaps, engine.submitted[0].prompt_token_ids) if name.startswith("<|")]
    assert found == [QWEN.prefix, "<|repo_name|>", QWEN.suffix, "<|endoftext|>", QWEN.middle]


async def test_what_fills_a_gap_ends_at_these_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, gaps: Tokenizer
) -> None:
    ids = gaps.vocabulary.tokenizer.token_to_id
    engine.script = lambda request: [
        *gaps.encode_plain("the fox"),
        ids("<|fim_pad|>"),
        *gaps.encode_plain("more"),
    ]
    answer = await completed(client, prompt="a", suffix="b", max_tokens=50)
    assert answer["choices"][0]["text"] == "the fox"
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", None)
    assert {ids(QWEN.prefix), ids(QWEN.suffix), ids(QWEN.middle), ids("<|fim_pad|>")} <= set(
        engine.submitted[-1].stop_token_ids
    )
    await completed(client, prompt="a", suffix="b", ignore_eos=True)
    assert not engine.submitted[-1].stop_token_ids
    await completed(client, prompt="a", suffix="")
    assert ids("<|fim_pad|>") not in engine.submitted[-1].stop_token_ids
    assert engine.submitted[-1].prompt_token_ids == gaps.encode("a")


async def test_an_echo_is_the_prompt_alone(client: httpx.AsyncClient, gaps: Tokenizer) -> None:
    for prompt in (f"a {QWEN.middle} b", gaps.encode_plain("the fox")):
        shown = prompt if isinstance(prompt, str) else "the fox"
        plain = (await completed(client, prompt=prompt, suffix="\nz", seed=1))["choices"][0]["text"]
        echoed = await completed(client, prompt=prompt, suffix="\nz", echo=True, seed=1)
        assert echoed["choices"][0]["text"] == shown + plain


async def test_truncation_cuts_the_text_before_the_gap(
    client: httpx.AsyncClient, engine: FakeEngine, gaps: Tokenizer
) -> None:
    prefix = "the quick brown fox " * 20
    before = gaps.encode_plain(prefix)
    answer = await completed(client, prompt=prefix, suffix="z", truncate_prompt_tokens=12, echo=True)
    ids = engine.submitted[0].prompt_token_ids
    num_after = len(gaps.encode_plain("z")) + 2
    assert len(ids) == 12
    assert ids[1:-num_after] == before[len(before) - (12 - 1 - num_after) :]
    assert answer["choices"][0]["text"].startswith(gaps.decode(ids[1:-num_after]))
    error = await refusal(client, prompt=prefix, suffix="z", truncate_prompt_tokens=num_after)
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")


@pytest.mark.parametrize("field", ["prompt", "suffix"])
@pytest.mark.parametrize("num_words", [20_000, 700], ids=["before-it-is-encoded", "encoded"])
async def test_a_gap_over_the_context_is_refused_by_the_field(
    client: httpx.AsyncClient, field: str, num_words: int
) -> None:
    error = await refusal(client, **{"prompt": "a", "suffix": "b", field: "word " * num_words})
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


async def test_more_prompts_than_choices_are_refused_before_each_gets_the_suffix(
    client: httpx.AsyncClient,
) -> None:
    error = await refusal(client, prompt=["a"] * 513, suffix="b")
    assert (error["param"], "at most 512" in error["message"]) == ("prompt", True)


async def test_log_probabilities_of_an_echo_are_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, prompt="a", suffix="b", echo=True, logprobs=1)
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "echo with logprobs" in error["message"]


class TestWithoutSuchTokens:
    @pytest.fixture
    def services(self, services: Services, tokenizer: Tokenizer) -> Services:
        return Services("tiny", services.engine, tokenizer, services.metrics)

    async def test_the_suffix_is_refused_with_what_to_do_instead(self, client: httpx.AsyncClient) -> None:
        error = await refusal(client, prompt="a", suffix="b")
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
        assert "model 'tiny'" in error["message"]
        assert "StarCoder" in error["message"]
        await completed(client, prompt="a", suffix="")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_by_all_three_of_its_tokens(tmp_path: Path, family: str) -> None:
    tokens = FAMILIES[family]
    own = [tokens.prefix, tokens.suffix, tokens.middle]
    assert find_fim(["<s>", *own]) == tokens
    assert find_fim(["<s>", *own[:2]]) is None
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens(own)  # not special ones
    loaded = load_tokenizer(tiny_tokenizers.save(tmp_path, tokenizer))
    assert loaded.fim is not None
    ids = [loaded.fim.prefix_id, *loaded.fim.encode_before("".join(own)), *loaded.fim.encode_after("x")]
    assert [name for name in names(loaded, ids) if name in own] == own


@pytest.mark.parametrize("has_metaspace", [True, False], ids=["metaspace", "normalizer"])
async def test_code_llama_has_a_space_before_the_prompt_and_none_before_the_suffix(
    tmp_path: Path, services: Services, engine: FakeEngine, has_metaspace: bool
) -> None:
    """As its authors encode it: <s> <PRE> and the prompt as any text, <SUF> and what goes on without a space,
    <MID>."""
    folder = tiny_tokenizers.save(tmp_path, code_llama(has_metaspace=has_metaspace))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    loaded = load_tokenizer(folder)
    app = create_app(Services("tiny", engine, loaded, services.metrics))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        await completed(client, prompt="the fox", suffix="x and the end")
    spelled = names(loaded, engine.submitted[0].prompt_token_ids)
    before, after = spelled[2 : spelled.index(LLAMA.suffix)], spelled[spelled.index(LLAMA.suffix) + 1 : -1]
    assert [spelled[0], spelled[1], spelled[-1]] == ["<s>", LLAMA.prefix, LLAMA.middle]
    assert ("".join(before), "".join(after)) == ("▁the▁fox", "x▁and▁the▁end")
