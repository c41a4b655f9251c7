"""Folders of the embedded model with a chat template in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

HERMES_TEMPLATE = (Path(__file__).parent / "hermes.jinja").read_text()
# Models that call tools in Hermes form have these tokens; those of the first kind are special.
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def demo_with_template(folder: Path, template: str) -> Path:
    """Copies the embedded model to the folder, which must not be there, and gives it the template."""
    shutil.copytree(str(files("headway.engine.demo")), folder)
    _edit(folder / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    return folder


def scripted_model(folder: Path) -> Path:
    """Does the same with a template in Hermes form whose tokens are in the vocabulary. The weights do not
    know those tokens, so that only a scripted server can use the folder."""
    demo_with_template(folder, HERMES_TEMPLATE)
    _edit(folder / "tokenizer.json", _add_tokens)
    num_tokens = len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
    _edit(folder / "config.json", lambda c: c.update(vocab_size=c["vocab_size"] + num_tokens))
    return folder


def _edit(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def _add_tokens(tokenizer: dict[str, Any]) -> None:
    first = len(tokenizer["model"]["vocab"])
    for token_id, name in enumerate([*CONTROL_TOKENS, *MARKUP_TOKENS], start=first):
        tokenizer["added_tokens"].append({
            "id": token_id, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": name in CONTROL_TOKENS,
        })  # fmt: skip
