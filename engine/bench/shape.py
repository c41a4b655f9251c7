"""The included shapes, which are models without weights, and `headway bench shape`, which makes a folder to
serve from one.

`headway serve` needs a tokenizer. The one written here has a made-up word for every id, so that the work with
text costs the same as for a real model. The last id ends a text, which grammars need.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase

from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.errors import ConfigError, HeadwayError
from headway.engine.protocol.exit_status import reports

SHAPES = Path(str(files("headway.engine.bench"))) / "shapes"
SPACE = "\u0120"  # how byte-level tokenizers write it
END = "<|end|>"
AS_WRITTEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
SPLITTING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@reports(HeadwayError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headway bench shape",
        description="Writes a model folder without weights, for headway serve FOLDER --load-format dummy.",
    )
    parser.add_argument("name", choices=shape_names(), help="the shape")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    arguments = parser.parse_args(argv)
    write_folder(arguments.name, arguments.folder)
    print(shlex.join(["headway", "serve", str(arguments.folder), "--load-format", "dummy"]))
    return 0


def shape_names() -> list[str]:
    return sorted(folder.name for folder in SHAPES.iterdir() if folder.is_dir())


def write_folder(name: str, folder: Path) -> None:
    """Writes the folder. Raises ConfigError, also for a folder that holds a model already."""
    if (folder / "config.json").exists():
        raise ConfigError(f"FOLDER is {folder}, which holds a model already; name another one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = read_model_spec(SHAPES / name).vocab_size
        (folder / "tokenizer.json").write_text(json.dumps(made_up_tokenizer(vocab_size)))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))
        shutil.copy(SHAPES / name / "config.json", folder)
    except OSError as error:
        raise ConfigError(f"FOLDER is {folder}, it cannot be written: {error}") from None


def made_up_tokenizer(vocab_size: int) -> dict[str, object]:
    """Returns the content of tokenizer.json: 256 bytes, then words of a space and letters, and last the token
    that ends a text. Text is tokenized byte by byte."""
    words = (SPACE + word for word in made_up_words())
    tokens = [*islice(chain(_bytes(), words), vocab_size - 1), END]
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": []}
    return {
        "version": "1.0",
        "pre_tokenizer": SPLITTING,
        "decoder": SPLITTING,
        "added_tokens": [{"id": vocab_size - 1, "content": END, "special": True, **AS_WRITTEN}],
        "model": model,
    }


def _bytes() -> Iterator[str]:
    """Yields the printable characters for the 256 bytes, by GPT-2's table."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return (chr(number) for number in [*printable, *range(256, 256 + 256 - len(printable))])


def made_up_words() -> Iterator[str]:
    return ("".join(letters) for n in range(2, 6) for letters in product(ascii_lowercase, repeat=n))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
