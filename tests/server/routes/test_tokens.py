"""POST /tokenize and GET /tokenizer_info, as vLLM's clients use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing import tiny_tokenizers
from tokenizers import processors

from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer
from headway.server.text.tokenizer_info import load_tokenizer_info

CONFIG: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "model_max_length": 4096,
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
}


class TestLlama:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        raw = tiny_tokenizers.byte_fallback()
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        folder = tiny_tokenizers.save(tmp_path, raw)
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
        (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}}))
        return folder

    @pytest.fixture
    def services(self, services: Services, folder: Path) -> Services:
        info = load_tokenizer_info(folder, "{{ messages }}")
        tokenizer = load_tokenizer(folder)
        return Services("tiny", services.engine, tokenizer, services.metrics, tokenizer_info=info)

    async def test_the_info_is_the_configuration_with_plain_strings(self, client: httpx.AsyncClient) -> None:
        info = (await client.get("/tokenizer_info")).json()
        assert {name: info[name] for name in ("bos_token", "eos_token", "pad_token", "chat_template")} == {
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": "{{ messages }}"
        }  # fmt: skip
        assert (info["tokenizer_class"], info["model_max_length"]) == ("LlamaTokenizer", 4096)

    async def test_a_text_that_begins_with_the_start_token_gets_no_second_one(
        self, client: httpx.AsyncClient, services: Services
    ) -> None:
        plain = services.tokenizer.encode_plain("the fox")
        for body, expected in (
            ({"prompt": "the fox"}, [1, *plain]),
            ({"prompt": "the fox", "add_special_tokens": False}, plain),
            ({"prompt": ""}, [1]),
        ):
            assert (await client.post("/tokenize", json=body)).json()["tokens"] == expected
        assert (await client.post("/tokenize", json={"prompt": "<s>the fox"})).json()["tokens"].count(1) == 1


@pytest.mark.parametrize("length", [1, 20_000], ids=["short", "long"])
async def test_an_answer_in_parts_is_one_body(
    client: httpx.AsyncClient, tokenizer: Tokenizer, length: int
) -> None:
    text = "the quick brown naïve 日本 fox\n" * length
    ids = tokenizer.encode(text)
    for flag in (None, True, False):
        response = await client.post("/tokenize", json={"prompt": text, "return_token_strs": flag})
        answer = response.json()
        assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
        assert (answer["count"], answer["tokens"]) == (len(ids), ids)
        strings = answer["token_strs"]
        assert strings is None if flag is False else len(strings) == len(ids)
        assert flag is False or strings[0] == tokenizer.decode(ids[:1])
    back = await client.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize(("value", "status"), [(None, 200), (True, 200), (False, 400)])
async def test_add_generation_prompt_is_what_chats_have(
    client: httpx.AsyncClient, value: bool | None, status: int
) -> None:
    response = await client.post("/tokenize", json={"prompt": "a", "add_generation_prompt": value})
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"] == "add_generation_prompt"
