"""What a model folder says about text, read from its files."""

from __future__ import annotations

import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Literal

import pytest
from headway_testing import tiny_tokenizers
from headway_testing.tiny_tokenizers import END_OF_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from headway.engine import ModelError, SamplingParams
from headway.server.text.tokenizer import Tokenizer, load_tokenizer


def write(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_level())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Its tokenizer.json puts <s> first."""
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder = tiny_tokenizers.save(tmp_path, tokenizer)
    write(folder, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>", "special": True})
    return folder


def test_text_goes_to_ids_and_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "def f():\n    return '日本語 😀'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_token_stands_in_for_an_empty_prompt_where_no_start_token_is(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("a")[0] != 0


@pytest.mark.parametrize(
    ("add_bos", "expected"),
    [(None, [1]), (True, [1]), (False, [])],
    ids=["as-the-file", "added", "not-added"],
)
def test_a_start_token_is_put_once_as_the_config_says(
    llama: Path, add_bos: bool | None, expected: list[int]
) -> None:
    extra = {} if add_bos is None else {"add_bos_token": add_bos}
    write(llama, "tokenizer_config.json", bos_token="<s>", eos_token="</s>", **extra)
    ids = load_tokenizer(llama).encode("hello")
    assert [i for i in ids if i < 3] == expected
    assert ids[: len(expected)] == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": [5, 7]}, {}, (2, 5, 7)), ({"eos_token_id": 5}, {"eos_token_id": 9}, (2, 5)),
     ({}, {"eos_token_id": 9}, (2, 9)), ({}, {"eos_token_id": None}, (2,))],
    ids=["list", "generation-config-wins", "config", "tokenizer-only"],
)  # fmt: skip
def test_end_tokens_come_from_every_file_that_names_them(
    llama: Path, generation: dict[str, object], config: dict[str, object], expected: tuple[int, ...]
) -> None:
    write(llama, "generation_config.json", **generation)
    write(llama, "config.json", **config)
    assert load_tokenizer(llama).stop_token_ids == expected


def test_sampling_defaults_are_the_models_where_it_names_them(folder: Path) -> None:
    assert load_tokenizer(folder).default_sampling == SamplingParams()
    write(folder, "generation_config.json", temperature=0.7, top_k=20, top_p=0.8, do_sample=True)
    expected = SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
    assert load_tokenizer(folder).default_sampling == expected


@pytest.mark.parametrize(
    "model",
    [
        models.BPE(vocab={"a": 0, "b": 1}, merges=[]),
        models.WordLevel(vocab={"<unk>": 0, "the": 1}, unk_token="<unk>"),
        models.Unigram([("<unk>", 0.0), ("x", -1.0)], unk_id=0),
    ],
    ids=["bpe", "words", "unigram"],
)
def test_a_tokenizer_that_writes_next_to_nothing_is_refused(tmp_path: Path, model: models.Model) -> None:
    """It would read every prompt as empty, or as unknown tokens alone."""
    HFTokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ModelError, match=r"tokenizer\.json has 2 entries, which write [012] of the 62 letters and digits"
    ):
        load_tokenizer(tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [("tokenizer.json", None, "no tokenizer.json"), ("tokenizer.json", "{}", "cannot be read"),
     ("generation_config.json", "{", "not valid JSON"), ("config.json", "[]", "must be an object")],
    ids=["missing", "broken", "not-json", "not-object"],
)  # fmt: skip
def test_broken_files_are_a_model_error_that_names_them(
    folder: Path, name: str, content: str | None, complaint: str
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=complaint) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


class TestTokenTable:
    @pytest.mark.parametrize("text", ["def f(x):\n    return x", "naïve café — “quotes”", "日本 😀"])
    @pytest.mark.parametrize("kind", ["folder", "llama"])
    def test_joined_its_bytes_are_the_text(
        self, text: str, kind: str, request: pytest.FixtureRequest
    ) -> None:
        tokenizer = load_tokenizer(request.getfixturevalue(kind))
        table = tokenizer.token_table()
        assert table is not None
        joined = b"".join(table.tokens[i] for i in tokenizer.encode_plain(text)).decode()
        assert joined.removeprefix(" ") == text  # Llama's pieces begin with the space that its decoder drops

    def test_special_tokens_have_their_names_and_those_that_end_a_text_are_told(self, llama: Path) -> None:
        table = load_tokenizer(llama).token_table()
        assert table is not None
        assert (table.special_ids, table.end_ids) == ([0, 1, 2], [0, 2])
        assert [table.tokens[i] for i in table.special_ids] == [b"<unk>", b"<s>", b"</s>"]

    def test_an_ordinary_token_that_ends_a_text_counts_as_special(self, folder: Path) -> None:
        write(folder, "generation_config.json", eos_token_id=[0, 7])
        table = load_tokenizer(folder).token_table()
        assert table is not None
        assert (table.special_ids, table.end_ids) == ([0, 7], [0, 7])

    def test_there_is_none_where_no_token_ends_a_text(self, folder: Path) -> None:
        write(folder, "config.json")
        write(folder, "tokenizer_config.json")
        assert load_tokenizer(folder).token_table() is None


class TestLeastTokens:
    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(
        text=st.text(max_size=60)
        | st.lists(st.sampled_from(["각", "ᾂ", "ǖ", " ", "\n", "def ", "日本", END_OF_TEXT])).map("".join),
        form=st.sampled_from(["NFC", "NFD"]),
        has_nfc=st.booleans(),
    )
    def test_no_text_has_fewer(self, text: str, form: Literal["NFC", "NFD"], has_nfc: bool) -> None:
        tokenizer = BOUNDED[has_nfc]
        text = unicodedata.normalize(form, text)
        assert 0 <= tokenizer.least_tokens(text) <= len(tokenizer.encode_plain(text))

    @pytest.mark.parametrize("has_nfc", [False, True])
    def test_a_long_text_has_some(self, has_nfc: bool) -> None:
        tokenizer = BOUNDED[has_nfc]
        assert tokenizer.least_tokens("the quick brown fox " * 1000) > (100 if has_nfc else 400)

    def test_a_tokenizer_that_may_drop_text_tells_nothing(self, tmp_path: Path) -> None:
        stripping = tiny_tokenizers.byte_level()
        stripping.normalizer = normalizers.Strip()
        splitting = tiny_tokenizers.byte_level()
        splitting.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        )
        swallowing = tiny_tokenizers.byte_level()
        swallowing.add_special_tokens([AddedToken("<x>", lstrip=True)])
        for i, kind in enumerate((stripping, splitting, swallowing, tiny_tokenizers.byte_fallback())):
            tokenizer = load_tokenizer(tiny_tokenizers.save(tmp_path / str(i), kind))
            assert tokenizer.least_tokens("x" * 100_000) == 0


def _bounded(*, has_nfc: bool) -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.NFC() if has_nfc else None
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(tiny_tokenizers.save(Path(folder), tokenizer))


BOUNDED = {has_nfc: _bounded(has_nfc=has_nfc) for has_nfc in (False, True)}
