"""What GET /tokenizer_info tells of a model folder, in vLLM's shape: its tokenizer_config.json with plain strings."""

from __future__ import annotations

from pathlib import Path

from headway.server.tokenizer import read_json

TokenizerInfo = dict[str, object]


def no_tokenizer_info() -> TokenizerInfo:
    """The info of a folder that says nothing."""
    return {"tokenizer_class": "PreTrainedTokenizerFast"}


def load_tokenizer_info(folder: Path, chat_template: str | None) -> TokenizerInfo:
    """Special tokens are told as their content, those of special_tokens_map.json where the other file has none."""
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json")
    info = no_tokenizer_info() | _filled(named, config)
    info.pop("chat_template", None)
    return info if chat_template is None else info | {"chat_template": chat_template}


def _filled(named: dict[str, object], config: dict[str, object]) -> TokenizerInfo:
    merged = named | {name: value for name, value in config.items() if value is not None or name not in named}
    return {name: _plain(value) for name, value in merged.items()}


def _plain(value: object) -> object:
    """A token that is written as an object becomes its content."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
