"""The held-out prompts as the embedded model reads them."""

from __future__ import annotations

import json
from importlib.resources import files

from tokenizers import Tokenizer


def heldout_prompts() -> list[list[int]]:
    """Token ids of each, in the file's order."""
    folder = files("headway.engine.demo")
    tokenizer = Tokenizer.from_str(folder.joinpath("tokenizer.json").read_text())
    entries = json.loads(folder.joinpath("heldout_prompts.json").read_text())
    return [tokenizer.encode(entry["text"]).ids for entry in entries]
