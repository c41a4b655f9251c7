"""Writes tokenizer.json and tokenizer_config.json from the vocabulary, the merges and the chat template of a
GGUF."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # llama.cpp's type of control tokens
# A conversation that tools take part in; the template of the GGUF knows none.
WITH_TOOLS = "tools or messages | selectattr('role', 'equalto', 'tool') | list"


class Values(Protocol):
    """The metadata of a GGUF."""

    def __getitem__(self, key: str) -> Any: ...


def write_tokenizer(metadata: Values, folder: Path) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = _tokenizer(tokens, metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.merges"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config = {key: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()}
    config |= {
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _chat_template(metadata["tokenizer.chat_template"]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(tokens: list[str], kinds: list[int], merges: list[str]) -> Tokenizer:
    """Returns a byte-level BPE with the pre-tokenizer that llama.cpp calls smollm, which separates digits."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _chat_template(own: str) -> str:
    with_tools = files("headway.engine.chat_model").joinpath("tools.jinja").read_text()
    return f"{{%- if {WITH_TOOLS} -%}}{with_tools}{{%- else -%}}{own}{{%- endif -%}}"
