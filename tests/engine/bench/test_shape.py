"""A folder of a shape can be served: its tokenizer knows every id, and reads any text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headway.engine.bench.shape import END, made_up_tokenizer, main, shape_names
from headway.engine.grammar.compile import compile_matcher, make_tokenizer, regex_source
from headway.engine.models.registry import read_model_spec
from headway.server.text.tokenizer import load_tokenizer


def test_every_id_has_a_text_of_its_own_and_every_text_has_ids(tmp_path: Path) -> None:
    assert main(["mimo-0.5b", str(tmp_path / "shape")]) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "shape/tokenizer.json"))
    size = read_model_spec(tmp_path / "shape").vocab_size
    assert tokenizer.get_vocab_size() == size == 151_680
    words = {tokenizer.decode([token_id]) for token_id in range(256, size - 1)}
    assert len(words) == size - 257
    assert all(word[0] == " " and word[1:].isascii() and word[1:].isalpha() for word in words)
    text = "def f(x):\n    return 'Größe 日本'\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_grammars_can_be_served_since_the_last_id_ends_a_text(tmp_path: Path) -> None:
    assert main(["mimo-0.5b", str(tmp_path)]) == 0
    size = read_model_spec(tmp_path).vocab_size
    table = load_tokenizer(tmp_path, size).token_table()
    assert table.end_ids == [size - 1]
    matcher = compile_matcher(make_tokenizer(table, size), regex_source("[ab]{2}"))
    for byte in b"ab":
        assert matcher.consume_token(table.tokens.index(bytes([byte])))
    assert matcher.is_stopped() or matcher.consume_token(size - 1)


def test_a_folder_with_a_model_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([shape_names()[0], str(tmp_path)]) == 1
    assert "holds a model already" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_small_vocabulary_is_bytes_and_an_end() -> None:
    model = made_up_tokenizer(257)["model"]
    assert isinstance(model, dict)
    assert sorted(map(len, model["vocab"])) == [1] * 256 + [len(END)]
