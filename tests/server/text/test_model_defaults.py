"""A folder's own defaults are judged once, by the rules for requests, and files that are none are named."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.checkpoints import qwen2_config
from headway_testing.fake_engine import INFO
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from headway.engine import MAX_STOP_TOKEN_IDS, ModelError, SamplingParams
from headway.engine.models import model_files as engine_model_files
from headway.server import cli
from headway.server.generation.engine_requests import RequestOptions, choice_requests
from headway.server.protocol.completions import CompletionRequest
from headway.server.text.chat_template import load_chat_template
from headway.server.text.tokenizer import load_tokenizer

VOCAB_SIZE = tiny_tokenizers.byte_level().get_vocab_size()
IDS = f"0 to {VOCAB_SIZE - 1} (the vocabulary)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its tokenizer ends texts with token 0."""
    folder = tiny_tokenizers.save(tmp_path / "model", tiny_tokenizers.byte_level())
    (folder / "config.json").write_text(json.dumps(qwen2_config(vocab_size=VOCAB_SIZE)))
    return folder


def write(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("value", "expected", "parts"),
    [
        ([2, 99_999], (0, 2), ["99999"]),
        (99_999, (0, 9), ["99999"]),
        ([5, True], (0, 5), ["True"]),
        ([5, -1], (0, 5), ["-1"]),
        (["5", 6], (0, 6), ["'5'"]),
        ([5.0, [6], 7], (0, 7), ["5.0", "[6]"]),
        ({"id": 5}, (0, 9), ["{'id': 5}"]),
        ([], (0, 9), []),
        (None, (0, 9), []),
    ],
    ids=str,
)
def test_end_tokens_that_are_none_are_left_out_with_a_warning(
    folder: Path, value: object, expected: tuple[int, ...], parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is the tokenizer's own, or config.json's where the list is empty then."""
    write(folder, "config.json", eos_token_id=9)
    write(folder, "generation_config.json", eos_token_id=value)
    assert load_tokenizer(folder, VOCAB_SIZE).stop_token_ids == expected
    assert warned(caplog) == [
        f"{folder}/generation_config.json: eos_token_id is {part}, a token id must be {IDS}; it is left out"
        for part in parts
    ]


def test_end_tokens_of_the_text_part_of_a_model_that_sees_images_are_found(folder: Path) -> None:
    write(folder, "config.json", eos_token_id=9)
    outer = load_tokenizer(folder, VOCAB_SIZE).stop_token_ids
    write(folder, "config.json", text_config={"eos_token_id": 9})
    assert load_tokenizer(folder, VOCAB_SIZE).stop_token_ids == outer
    assert 9 in outer


def test_more_end_tokens_than_a_request_may_have_are_cut(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, "generation_config.json", eos_token_id=list(range(1, 101)))
    stop = load_tokenizer(folder, VOCAB_SIZE).stop_token_ids
    assert stop == tuple(range(MAX_STOP_TOKEN_IDS))
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("top_k", 1e30, "-1 to"),
        ("top_k", 10**30, "-1 to"),
        ("top_k", 20.5, "a whole number"),
        ("top_k", True, "a whole number"),
        ("temperature", "hot", "0 to 2"),
        ("temperature", -0.5, "0 to 2"),
        ("temperature", 1e9, "0 to 2"),
        ("temperature", float("nan"), "0 to 2"),
        ("temperature", float("inf"), "0 to 2"),
        ("temperature", [0.7], "0 to 2"),
        ("temperature", False, "0 to 2"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("top_p", float("nan"), "at most 1"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", {"value": 0.1}, "0 to 1"),
        ("repetition_penalty", 0, "0.01 to 100"),
        ("repetition_penalty", "1.1", "0.01 to 100"),
    ],
    ids=str,
)
def test_sampling_that_no_request_may_have_is_left_out_with_a_warning(
    folder: Path, key: str, value: object, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, "generation_config.json", **{"min_p": 0.25, "top_p": 0.5} | {key: value})
    expected = {"min_p": 0.25, "top_p": 0.5} | {key: getattr(SamplingParams(), key)}
    assert load_tokenizer(folder).default_sampling == msgspec.convert(expected, SamplingParams)
    (line,) = warned(caplog)
    assert line.startswith(f"{folder}/generation_config.json: {key} is ")
    assert limit in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": None, "top_k": None}, SamplingParams()),
        ({"top_k": -1}, SamplingParams()),
        ({"top_k": 50, "temperature": 0}, SamplingParams(top_k=50, temperature=0.0)),
        ({"do_sample": False, "top_p": 0.9}, SamplingParams(top_p=0.9)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.6)),
    ],
    ids=["null", "off", "integer", "do-sample-does-not-count", "nor-for-temperature"],
)
def test_sampling_that_a_request_may_have_is_the_default(
    folder: Path, content: dict[str, object], expected: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, "generation_config.json", **content)
    assert load_tokenizer(folder).default_sampling == expected
    assert warned(caplog) == []


def test_a_request_is_told_of_no_field_that_it_did_not_send(folder: Path) -> None:
    """At 687bc48 each of these defaults refused every request."""
    write(
        folder,
        "generation_config.json",
        eos_token_id=[2, 99_999, *range(3, 99)],
        top_k=1e30,
        temperature="hot",
        top_p=float("nan"),
    )
    tokenizer = load_tokenizer(folder, INFO.vocab_size)
    (request,) = choice_requests(CompletionRequest(prompt="a"), RequestOptions(), [[1]], tokenizer, INFO)
    assert request.sampling == msgspec.structs.replace(SamplingParams(), seed=request.sampling.seed)
    assert max(request.stop_token_ids) < INFO.vocab_size
    assert len(request.stop_token_ids) <= MAX_STOP_TOKEN_IDS


@pytest.mark.parametrize(
    ("key", "token", "limit"),
    [("eos_token", "<far>", f"its id {VOCAB_SIZE} must be {IDS}"), ("bos_token", "<far>", f"its id {VOCAB_SIZE}"),
     ("bos_token", {"content": "<none>"}, "a token of tokenizer.json"), ("eos_token", 7, "a string or null")],
    ids=["eos-beyond", "bos-beyond", "unknown", "number"],
)  # fmt: skip
def test_a_special_token_that_is_none_of_the_models_is_left_out(
    folder: Path, key: str, token: object, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    far = tiny_tokenizers.byte_level()
    far.add_special_tokens(["<far>"])
    tiny_tokenizers.save(folder, far)
    write(folder, "tokenizer_config.json", **{key: token})
    tokenizer = load_tokenizer(folder, VOCAB_SIZE)
    assert (tokenizer.start_token_id, tokenizer.stop_token_ids) == (None, (0,))
    assert [limit in line for line in warned(caplog) if "tokenizer_config.json" in line] == [True]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1),
        ({"eos_token": "<|endoftext|>"}, 1),
        ({"eos_token": "<|endoftext|>", "added_tokens_decoder": {}}, 0),
    ],
    ids=["alone", "before-the-config", "behind-one-that-lists-added-tokens"],
)
def test_special_tokens_come_from_the_file_that_transformers_takes_them_from(
    tmp_path: Path, config: dict[str, object], expected: int
) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_tokenizers.save(tmp_path, tokenizer)
    write(folder, "tokenizer_config.json", **config)
    for name in ("generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
    write(folder, "special_tokens_map.json", eos_token={"content": tokenizer.id_to_token(1), "lstrip": False})
    assert PreTrainedTokenizerFast.from_pretrained(folder).eos_token_id == expected
    assert load_tokenizer(folder).stop_token_ids == (expected,)


@pytest.mark.parametrize("num_added", [0, 3000], ids=["trained", "added"])
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, num_added: int) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens([f"word{i}" for i in range(num_added)])
    folder = tiny_tokenizers.save(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size()
    assert load_tokenizer(folder, size).encode("a")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder, size - 1)
    parts = (f"{folder}/tokenizer.json", f"up to {size - 1:,}", f"limit is {size - 2:,}", "vocab_size")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_special_tokens_beyond_the_vocabulary_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    tiny_tokenizers.save(folder, tokenizer)
    assert load_tokenizer(folder, size).encode("a")
    assert [f"'<pad>' ({size})" in line for line in warned(caplog)] == [True]


def test_a_tokenizer_that_puts_an_unknown_token_around_every_text_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<start>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=[("<start>", size)])
    folder = tiny_tokenizers.save(tmp_path, tokenizer)
    with pytest.raises(ModelError, match=f"puts token id {size} around every text"):
        load_tokenizer(folder, size)


def of_a_tebibyte(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def in_a_circle(file: Path) -> None:
    file.symlink_to(file)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (Path.mkdir, "is a folder, it must be a regular file"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "is a device"),
    "nothing": (lambda file: file.symlink_to("/no/such/file"), "is a link to /no/such/file, which does not"),
    "circle": (in_a_circle, "cannot be read: Too many levels of symbolic links"),
    "large": (of_a_tebibyte, "has 1,099,511,627,776 bytes, the limit is"),
    "bytes": (lambda file: file.write_bytes(b'{"a": "\xff"}'), "cannot be read|is not UTF-8"),
}
JSON_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "deep": (lambda file: file.write_text("[" * 200_000), "is not valid JSON"),
    "long-number": (lambda file: file.write_text('{"vocab_size": 1' + "0" * 5000 + "}"), "is not valid JSON"),
    "list": (lambda file: file.write_text("[]"), "it must be an object"),
    "surrogate": (lambda file: file.write_text(r'{"a": [{"b\uD83D": "\ude00"}]}'), "a lone surrogate"),
}
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
CASES = [(name, *fault) for name in FILES for fault in FAULTS.items()]
CASES += [(name, *fault) for name in FILES if "config" in name for fault in JSON_FAULTS.items()]


@pytest.mark.parametrize(("name", "kind", "fault"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_a_file_that_is_none_is_one_line_and_status_1(
    folder: Path,
    name: str,
    kind: str,
    fault: tuple[Callable[[Path], object], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil, complaint = fault
    (folder / name).unlink(missing_ok=True)
    spoil(folder / name)
    assert cli.main(["serve", "--port", "0", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway: {folder / name} ")
    assert any(part in error for part in complaint.split("|"))
    assert "Traceback" not in error


def test_escapes_of_whole_characters_are_read(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(r'{"chat_template": "\ud83d\ude00 \\udead"}')
    template = load_chat_template(folder)
    assert template is not None
    assert template.source == "\U0001f600 \\udead"


@pytest.mark.parametrize("name", [n for n in FILES if n != "tokenizer.json"])
def test_a_file_without_permission_is_one_line_that_names_the_user(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything: the system's answer is made up."""
    (folder / name).touch()

    def deny(path: Path, mode: str) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(engine_model_files.Path, "open", deny)
    with pytest.raises(ModelError, match=r"cannot be read: Permission denied; give user \d+ the right"):
        (load_chat_template if name == "chat_template.jinja" else load_tokenizer)(folder)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("a" * 5000, "File name too long"), ("~no-such-user/model", "give the folder's full path")],
    ids=["long", "home"],
)
def test_a_name_that_no_system_has_is_one_line(
    model: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", model]) == 1
    assert complaint in capsys.readouterr().err
