"""The held-out prompts, as the embedded model or another reads them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

from headway.engine.protocol.errors import ModelError


def heldout_prompts(model: Path | None = None) -> list[list[int]]:
    """Returns the token ids of each, in the file's order. Raises ModelError.

    model: a folder whose tokenizer.json reads them; None: the embedded model's.
    """
    folder = files("headway.engine.demo")
    file = folder.joinpath("tokenizer.json") if model is None else model / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # noqa: BLE001 - the library raises nothing more special
        raise ModelError(f"{file} cannot be read ({error}); give a folder with a tokenizer.json") from None
    entries = json.loads(folder.joinpath("heldout_prompts.json").read_text())
    return [tokenizer.encode(entry["text"]).ids for entry in entries]
