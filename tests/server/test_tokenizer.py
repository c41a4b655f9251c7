"""What a model folder says about text, read from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headway_testing import tiny_tokenizers
from tokenizers import processors

from headway.engine import ModelError, SamplingParams
from headway.server.tokenizer import load_tokenizer


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
