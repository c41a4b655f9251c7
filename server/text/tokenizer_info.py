"""The body of GET /tokenizer_info for a model folder, in vLLM's format: its tokenizer_config.json with
plain strings."""

from __future__ import annotations

from pathlib import Path

from headway.engine import read_json_object
from headway.server.text.model_defaults import read_tokenizer_config

TokenizerInfo = dict[str, object]


def no_tokenizer_info() -> TokenizerInfo:
    """Returns the description of a folder without any."""
    return {"tokenizer_class": "PreTrainedTokenizerFast"}


def load_tokenizer_info(folder: Path, chat_template: str | None) -> TokenizerInfo:
    """Returns the folder's tokenizer configuration with special tokens as their content, and the served
    template."""
    config = (read_json_object(folder / "special_tokens_map.json") or {}) | read_tokenizer_config(folder)
    info = no_tokenizer_info() | {name: _plain(value) for name, value in config.items()}
    info.pop("chat_template", None)
    return info if chat_template is None else info | {"chat_template": chat_template}


def _plain(value: object) -> object:
    """Replaces a token that is written as an object by its content."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
