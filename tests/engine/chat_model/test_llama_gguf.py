"""A GGUF that is converted computes what it computed, and says the same tokens, as transformers reads
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headway_testing import tiny_gguf
from headway_testing.families import assert_logits_of_transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headway.engine.chat_model.llama_gguf import convert
from headway.engine.protocol.errors import ModelError

CHATS = [
    [{"role": "user", "content": "What is it?"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "  Hi\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]
TEXTS = [
    "The quick brown fox: 1234 + 56 = 1290, é ½ ² ٣", "def read(path):\n    return 12\n    7   \n  34x", "日本語 👩‍👩‍👧‍👦\t\r\n  x", "", " ", "don't I'll",
    "<|im_start|>user\nhi<|im_end|>\n",
]  # fmt: skip
SMOLLM_PATTERNS = (
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source") / "tiny.gguf"


@pytest.fixture(scope="module")
def twin(source: Path) -> PreTrainedModel:
    return tiny_gguf.write(source)


@pytest.fixture(scope="module")
def folder(source: Path, twin: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "Tiny"
    convert(source, made, lambda _: None)
    return made


def test_headway_computes_the_logits_of_the_dequantized_weights(folder: Path, twin: PreTrainedModel) -> None:
    assert_logits_of_transformers(twin, folder)


def test_transformers_reads_the_very_weights(folder: Path, twin: PreTrainedModel) -> None:
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.float32
    theirs = twin.state_dict()
    assert read.state_dict().keys() == theirs.keys()
    assert [name for name, weight in read.state_dict().items() if not torch.equal(weight, theirs[name])] == []
    assert read.config.rms_norm_eps == twin.config.rms_norm_eps
    assert (read.generation_config.eos_token_id, read.generation_config.repetition_penalty) == (2, 1.1)


def test_progress_is_told_to_the_end(source: Path, twin: PreTrainedModel, tmp_path: Path) -> None:
    told: list[float] = []
    convert(source, tmp_path / "Tiny", told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) == len(list(twin.parameters()))


def test_texts_become_tokens_and_tokens_texts(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")  # fmt: skip


def test_digits_stand_alone_and_all_else_is_as_transformers_reads_the_file(
    folder: Path, source: Path, twin: PreTrainedModel
) -> None:
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert len(theirs("1234").input_ids) == 1
    assert len(ours("1234").input_ids) == 4
    assert len(ours(" 1234").input_ids) == 5
    without_digits = ["".join(c for c in text if not c.isnumeric()) for text in TEXTS]
    assert [ours(t).input_ids for t in without_digits] == [theirs(t).input_ids for t in without_digits]


def test_texts_are_split_as_llama_cpp_splits_them(folder: Path) -> None:
    """By its two expressions for smollm, one after the other."""
    ours = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SMOLLM_PATTERNS]
    theirs = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # fmt: skip
    assert [ours.pre_tokenize_str(text) for text in TEXTS] == [theirs.pre_tokenize_str(t) for t in TEXTS]


def test_chats_without_tools_are_rendered_by_the_template_of_the_file(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        for begins_answer in (True, False):
            rendered = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=begins_answer
            )
            assert rendered == tokenizer.apply_chat_template(
                chat, chat_template=tiny_gguf.CHATML, tokenize=False, add_generation_prompt=begins_answer
            )


def test_chats_with_tools_show_tools_calls_and_results(folder: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    text = tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False, add_generation_prompt=True)
    system, user, assistant, result, start = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe kind.\n\n")
    assert (
        '<tools>\n{"type": "function", "function": {"name": "weather", "parameters": {}}}\n</tools>' in system
    )
    assert user == "user\nRome?<|im_end|>\n"
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in assistant
    )
    assert result == "user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    assert start == "assistant\n"
    assert result in tokenizer.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2', supported is 'smollm'"),
        ({"tokenizer.chat_template": None}, "the GGUF has no tokenizer.chat_template"),
        ({"llama.block_count": 2}, "tensors are missing or unknown: blk.2.attn_k.weight, "),
        ({"llama.block_count": 4}, "tensors are missing or unknown: blk.3.attn_k.weight, "),
    ],
    ids=["pre-tokenizer", "no-template", "more-layers", "fewer-layers"],
)
def test_a_gguf_of_another_kind_is_refused_by_name(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    tiny_gguf.write(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ModelError, match=complaint):
        convert(tmp_path / "odd.gguf", tmp_path / "Odd", lambda _: None)


def test_the_files_are_those_of_a_folder_that_people_publish(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-6
