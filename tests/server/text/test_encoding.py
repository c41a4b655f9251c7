"""Text to ids: in pieces, beside the event loop, cut at the end, with special tokens around it once."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from headway.server.app import create_app
from headway.server.base.errors import ApiError
from headway.server.requests.services import Services
from headway.server.text import text_cuts
from headway.server.text.encoding import EncodingPool
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/completions"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
WORDS = [
    "the ", "quick ", "Größe ", "naïve, ", "cafe\u0301 ", "日本語の", "漢字。", "한국어 ", "мир! ", "it's ", "'S ", "a", "B",
    "_", "x.y;", "(f) ", "12345 ", "\t", "\n", "\n\n", " \n", "\r\n", "  ", "   ", "\u3000", "。。", "!!\n", "\u0301",
    "🙂", "👩‍👩‍👧", END_OF_TEXT, "<s>", "\u2581", "~",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=80).map("".join) | st.text(max_size=80)


def loaded(tokenizer: HFTokenizer, **config: Any) -> Tokenizer:
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_tokenizers.save(Path(name), tokenizer)
        if config:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(folder)


def split_by(*patterns: str) -> HFTokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def llama2() -> HFTokenizer:
    """As byte_fallback, without tokens that go from one word into the next."""
    content = json.loads(tiny_tokenizers.byte_fallback().to_str())
    model = content["model"]
    model["vocab"] = {
        t: i for t, i in model["vocab"].items() if "\u2581" not in t[1:] or not t.strip("\u2581")
    }
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    model["merges"] = [pair for pair in model["merges"] if set(pair) <= model["vocab"].keys()]
    return HFTokenizer.from_str(json.dumps(content))


def gemma() -> HFTokenizer:
    tokenizer = llama2()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def nfc() -> HFTokenizer:
    tokenizer = split_by(QWEN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def llama(**config: Any) -> Tokenizer:
    """Its tokenizer.json puts <s> first."""
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return loaded(tokenizer, bos_token="<s>", eos_token="</s>", **config)


DEEPSEEK = [pattern for pattern in text_cuts.KNOWN_PATTERNS if pattern.startswith(("[一", "[!"))]
KINDS = {
    "gpt2": tiny_tokenizers.byte_level(),
    "llama3": split_by(LLAMA_3),
    "qwen": nfc(),
    "deepseek": split_by(r"\p{N}{1,3}", *sorted(DEEPSEEK, reverse=True)),
    "llama2": llama2(),
    "gemma": gemma(),
}
TOKENIZERS = {name: loaded(tokenizer) for name, tokenizer in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(text=TEXTS, count=st.integers(1, 60), size=st.sampled_from([1, 5, 30]))
def test_pieces_have_the_ids_and_offsets_of_the_whole_text(
    kind: str, text: str, count: int, size: int
) -> None:
    tokenizer = TOKENIZERS[kind]
    whole = KINDS[kind].encode(text, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cuts, "PIECE_CHARACTERS", size)
        pieces = list(tokenizer.pieces(text, with_starts=True))
        assert [i for piece in pieces for i in piece.token_ids] == whole.ids
        assert [i for piece in pieces for i in piece.starts] == [start for start, _ in whole.offsets]
        assert tokenizer.encode_plain(text) == whole.ids
        assert tokenizer.last_ids(text, count) == whole.ids[-count:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_many_pieces(kind: str) -> None:
    assert len(list(TOKENIZERS[kind].pieces("the quick brown fox, " * 10_000))) > 10


def swallowing() -> HFTokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def spanning() -> HFTokenizer:
    """Its vocabulary has a token of two words."""
    vocabulary = {"<unk>": 0, "a": 1, "\u2581": 2, "b": 3, "a\u2581": 4, "a\u2581b": 5}
    tokenizer = HFTokenizer(models.BPE(vocabulary, [("a", "\u2581"), ("a\u2581", "b")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        split_by(r"\w+\s\w+|."),
        swallowing(),
        spanning(),
        HFTokenizer(models.WordPiece({"a": 0}, unk_token="a")),
    ],
    ids=["unknown-pattern", "lstrip", "token-across-words", "not-bpe"],
)
def test_where_nothing_is_proven_a_text_is_encoded_whole(tokenizer: HFTokenizer) -> None:
    assert loaded(tokenizer).cuts is None


class TestLock:
    def test_encoding_leaves_the_interpreter_to_others(self, tokenizer: Tokenizer) -> None:
        text = "the quick brown fox jumps over naïve cats\n" * 20_000
        gaps: list[float] = []
        is_done = threading.Event()

        def tick() -> None:
            last = time.perf_counter()
            while not is_done.is_set():
                time.sleep(0.002)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        thread = threading.Thread(target=tick)
        thread.start()
        started = time.perf_counter()
        tokenizer.encode(text)
        seconds = time.perf_counter() - started
        is_done.set()
        thread.join()
        assert max(gaps) < seconds / 4

    async def test_a_long_text_does_not_hold_up_short_ones(self) -> None:
        pool = EncodingPool()
        is_released = threading.Event()
        long = [asyncio.create_task(pool.run(["x" * 200_000], is_released.wait)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(pool.run(["x" * 2000], lambda: 1), 10) == 1
        assert await pool.run(["x"], lambda: 2) == 2
        is_released.set()
        assert await asyncio.gather(*long) == [True] * 3

    async def test_text_that_waits_is_bounded(self) -> None:
        pool = EncodingPool(max_waiting_bytes=500_000)
        is_released = threading.Event()
        long = [asyncio.create_task(pool.run(["x" * 200_000], is_released.wait)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as refused:
            await pool.run(["x" * 200_000], lambda: 1)
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
        is_released.set()
        await asyncio.gather(*long)
        assert await pool.run(["x" * 200_000], lambda: 1) == 1


class TestLimits:
    @pytest.fixture
    def lengths(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Of the texts that are encoded."""
        encoded: list[int] = []
        piece = Tokenizer._piece

        def noted(self: Tokenizer, text: str, start: int, *, with_starts: bool) -> Any:
            encoded.append(len(text))
            return piece(self, text, start, with_starts=with_starts)

        monkeypatch.setattr(Tokenizer, "_piece", noted)
        return encoded

    async def test_only_the_end_of_a_text_that_is_to_be_cut_is_encoded(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, lengths: list[int]
    ) -> None:
        text = "the quick brown fox jumps over the lazy dog\n" * 50_000
        body = {"prompt": text, "truncate_prompt_tokens": 50, "max_tokens": 1}
        assert (await client.post(URL, json=body)).status_code == 200
        assert sum(lengths) < 100_000
        assert engine.submitted[0].prompt_token_ids == tokenizer.encode(text[-1000:])[-50:]

    async def test_a_text_that_grows_too_long_is_not_encoded_to_its_end(
        self,
        client: httpx.AsyncClient,
        tokenizer: Tokenizer,
        lengths: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(Tokenizer, "least_tokens", lambda *_: 0)  # as for tokenizers without such a bound
        response = await client.post(URL, json={"prompt": "the quick brown fox\n" * 100_000})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(lengths) < 100_000

    @pytest.mark.parametrize("nested", [False, True], ids=["ids", "lists-of-ids"])
    async def test_ids_that_cannot_fit_are_refused_and_the_last_are_kept(
        self, client: httpx.AsyncClient, engine: FakeEngine, nested: bool
    ) -> None:
        ids = [*[7] * 100_000, 1, 2, 3]
        prompt = [ids] if nested else ids
        response = await client.post(URL, json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        await client.post(URL, json={"prompt": prompt, "truncate_prompt_tokens": 3, "max_tokens": 1})
        assert engine.submitted[0].prompt_token_ids == [1, 2, 3]

    async def test_a_prompt_of_the_whole_context_is_scored(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        ids = [40] * INFO.max_model_len
        body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = (await client.post(URL, json=body)).json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == INFO.max_model_len
        assert engine.submitted[0].prompt_token_ids == ids
        for change in ({"prompt": [*ids, 40]}, {"max_tokens": 1}):
            response = await client.post(URL, json={**body, **change})
            assert (response.status_code, response.json()["error"]["code"]) == (
                400,
                "context_length_exceeded",
            )


class TestSpecialTokens:
    @pytest.mark.parametrize("config", [{}, {"add_bos_token": True}], ids=["as-the-file", "added"])
    def test_a_text_that_begins_with_the_start_token_gets_no_second_one(self, config: dict[str, Any]) -> None:
        ids = llama(**config).encode("<s>hello")
        assert (ids[0], ids.count(1)) == (1, 1)

    def test_truncation_does_not_cut_the_start_token_away(self) -> None:
        tokenizer = llama()
        plain = tokenizer.encode_plain("the quick brown fox")
        assert tokenizer.surrounded(plain, 4) == [1, *plain[-3:]]
        assert tokenizer.surrounded([1, *plain], 4) == [1, *plain[-3:]]
        assert tokenizer.surrounded(plain, 1) == [1]
        assert tokenizer.surrounded(plain, 100) == [1, *plain]

    def test_tokens_around_both_ends_are_put_once(self) -> None:
        raw = tiny_tokenizers.byte_fallback()
        raw.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer = loaded(raw, bos_token="<s>", eos_token="</s>")
        plain = tokenizer.encode_plain("the fox")
        for text in ("the fox", "<s>the fox</s>"):
            ids = tokenizer.encode(text)
            assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
        assert tokenizer.surrounded(plain, 4) == [1, *plain[-2:], 2]

    @pytest.fixture
    def services(self, services: Services) -> Services:
        return Services("tiny", services.engine, llama(), services.metrics)

    @pytest.mark.parametrize("length", [5, 60_000], ids=["short", "long"])
    async def test_a_prompt_that_is_cut_keeps_its_start_token(
        self, client: httpx.AsyncClient, engine: FakeEngine, services: Services, length: int
    ) -> None:
        text = "the fox " * length + "jumps"
        await client.post(URL, json={"prompt": text, "truncate_prompt_tokens": 6, "max_tokens": 1})
        plain = services.tokenizer.encode_plain(text)
        assert engine.submitted[0].prompt_token_ids == [1, *plain[-5:]]

    async def test_add_special_tokens_false_puts_nothing_around_a_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine, services: Services
    ) -> None:
        for value in (False, True, None):
            body = {"prompt": "the fox", "add_special_tokens": value, "max_tokens": 1}
            assert (await client.post(URL, json=body)).status_code == 200
        plain = services.tokenizer.encode_plain("the fox")
        assert [s.prompt_token_ids for s in engine.submitted] == [plain, [1, *plain], [1, *plain]]
        body = {"prompt": "", "add_special_tokens": False}
        assert (await client.post(URL, json=body)).json()["error"]["param"] == "prompt"


class TestOffsets:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("text", ["the fox, it's 日本", "the  quick <s> fox", f"naïve{END_OF_TEXT} mir"])
    async def test_offsets_are_places_in_the_clients_text(
        self, services: Services, kind: str, text: str
    ) -> None:
        found = await echoed(services, TOKENIZERS[kind], text)
        assert found["text"] == text
        prepends = kind == "llama2"  # its normalizer puts a space first, which the text does not have
        for place, name in zip(found["logprobs"]["text_offset"], found["logprobs"]["tokens"], strict=True):
            names = ("bytes:", name, name[1:]) if prepends else ("bytes:", name)
            assert name.startswith("bytes:") or text[place:].startswith(names)

    async def test_offsets_count_what_the_normalizer_composes(self, services: Services) -> None:
        text = "cafe\u0301 the quick"
        found = await echoed(services, TOKENIZERS["qwen"], text)
        places = dict(zip(found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True))
        assert places[" the"] == 5

    async def test_trimmed_offsets_still_begin_with_the_space(self, services: Services) -> None:
        raw = tiny_tokenizers.byte_level()
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
        found = await echoed(services, loaded(raw), "the quick brown")
        assert found["logprobs"]["text_offset"] == [0, 3, 9]


async def echoed(services: Services, tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    app = create_app(Services("tiny", services.engine, tokenizer, services.metrics))
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        response = await client.post(URL, json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return dict(choice)
