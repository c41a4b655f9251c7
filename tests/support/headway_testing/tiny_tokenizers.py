"""Tokenizers trained on the spot from a few lines of many scripts: byte-level, and one with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
DELIMITERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEXT = [
    "def read_config(path):\n    with open(path) as f:\n        return json.load(f)\n",
    "import os, sys\nclass Reader(object):\n    def __init__(self, name=None):\n        self.name = name\n",
    "Die Größe der Bäume übertrifft alles, naïve café, façade — “quotes” … and ½ of it.",
    "日本語のテキストと漢字。中文文本也在这里。한국어도 있어요.",
    "Привет, мир! λψξ. مرحبا بالعالم שלום עולם",
    "emoji: 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and flags 🇩🇪🇯🇵; combining: é ñ",
    "the quick brown fox jumps over the lazy dog and the quick brown cat",
]


def byte_level(vocab_size: int = 600) -> Tokenizer:
    """Makes one like Qwen2's: 256 bytes, merges, one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback(vocab_size: int = 400) -> Tokenizer:
    """Makes one like Llama 2's: pieces with `▁` for spaces; what is not ASCII has no piece and is spelled in
    bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in TEXT if line.isascii()], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the bytes are plain entries of the vocabulary
    return Tokenizer.from_str(json.dumps(content))


CHAT_TEMPLATE = """\
{%- if messages[0].role == 'assistant' %}{{ raise_exception('the first message must not be an answer') }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def save_with_template(folder: Path, template: object = CHAT_TEMPLATE) -> Path:
    """Writes a folder whose tokenizer_config.json has a chat template."""
    config = {"eos_token": END_OF_TEXT, "bos_token": None, "chat_template": template}
    (save(folder, byte_level()) / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_with_delimiters(folder: Path, kind: Literal["special", "added", "spelled"]) -> Path:
    """Writes a folder in which the delimiters of reasoning and of calls are special tokens, or other added
    tokens, or ordinary text."""
    tokenizer = byte_level()
    if kind != "spelled":
        tokenizer.add_tokens([AddedToken(text, special=kind == "special") for text in DELIMITERS])
    return save(folder, tokenizer)


def save(folder: Path, tokenizer: Tokenizer, **generation: object) -> Path:
    """Writes a model folder's files for text; `generation` goes to generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT, "bos_token": None}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
