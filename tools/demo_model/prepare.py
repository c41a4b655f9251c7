"""Turns Python's standard library into the demo model's training data.

Reads the library of the interpreter that runs it (CPython 3.11.7, pinned by digest) and writes, into one
folder, the token streams, the tokenizer, the held-out text and the held-out prompts. Knows nothing of the
model.
"""

from __future__ import annotations

import argparse
import ast
import codeop
import hashlib
import json
import platform
import random
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PYTHON_VERSION = "3.11.7"
CORPUS_SHA256 = "09a552a9932c57ade4efebdf9f7a1dd80243254b5c0a29b46396a5dbb9388fd0"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096

# One in HELD_OUT_MODULUS of the eligible modules is held out, chosen by the hash of its path.
HELD_OUT_MODULUS = 12
HELD_OUT_BYTES = (4_000, 60_000)
# A training file that shares this part of the lines of a held-out file (or of its own) is dropped.
DUPLICATE_SHARE = 0.3
DUPLICATE_MIN_LINES = 8
MIN_LINE_LENGTH = 12

# Tables, generated files, Python 2 and prose: text, but not Python worth imitating.
EXCLUDED = (
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/data/",
    "html/entities.py",
    "_sysconfigdata",
    "config-3",
)
MAX_DIGIT_SHARE = 0.10
TEST_FOLDERS = {"test", "tests", "idle_test"}

# A word includes one space before it and its underscores. A newline is always a token of its own, so that a
# prompt that ends with a line has the same tokens as within a file.
WORDS = (
    r"\n| ?[\p{L}_][\p{L}\p{N}_]*| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+"
)  # fmt: skip

NUM_PROMPTS = 100
PROMPT_TOKENS = (100, 250)


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the library: its path below the library's folder, with slashes, and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        return not TEST_FOLDERS.isdisjoint(self.path.split("/"))

    @property
    def lines(self) -> set[str]:
        """Returns the lines that are long enough to distinguish files."""
        return {s for line in self.text.splitlines() if len(s := line.strip()) >= MIN_LINE_LENGTH}


def read_corpus(stdlib: Path) -> list[Module]:
    """Returns every module worth learning from, sorted by path. Exits for another version than the pinned
    one."""
    if platform.python_version() != PYTHON_VERSION:
        raise SystemExit(
            f"the corpus is the standard library of CPython {PYTHON_VERSION}, this is {platform.python_version()}: "
            "run with that version, or train from a folder prepared by it (--data)"
        )
    paths = sorted(p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts)
    modules = [m for p in paths if (m := _read_module(p, stdlib)) is not None]
    digest = hashlib.sha256("".join(f"{m.path}\n{m.text}\n" for m in modules).encode()).hexdigest()
    if digest != CORPUS_SHA256:
        raise SystemExit(
            f"the corpus has sha256 {digest}, expected {CORPUS_SHA256}: "
            f"{stdlib} is not the unchanged library of CPython {PYTHON_VERSION} with its tests"
        )
    return modules


def _read_module(path: Path, stdlib: Path) -> Module | None:
    name = path.relative_to(stdlib).as_posix()
    if name.startswith(EXCLUDED):
        return None
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    is_table = sum(c.isdigit() for c in text) > MAX_DIGIT_SHARE * len(text)
    return None if is_table or not text.strip() else Module(name, text)


def split(modules: list[Module]) -> tuple[list[Module], list[Module], list[str]]:
    """Returns (training modules, held-out modules, paths dropped from training as near-duplicates)."""
    held_out = [m for m in modules if _is_held_out(m)]
    held_out_lines = [m.lines for m in held_out]
    rest = [m for m in modules if not _is_held_out(m)]
    dropped = [m.path for m in rest if any(_are_duplicates(m.lines, lines) for lines in held_out_lines)]
    return [m for m in rest if m.path not in set(dropped)], held_out, dropped


def _is_held_out(module: Module) -> bool:
    low, high = HELD_OUT_BYTES
    is_eligible = not module.is_test and low <= len(module.text.encode()) <= high
    return is_eligible and _hash(module.path) % HELD_OUT_MODULUS == 0


def _are_duplicates(a: set[str], b: set[str]) -> bool:
    shared = len(a & b)
    return shared >= DUPLICATE_MIN_LINES and shared >= DUPLICATE_SHARE * min(len(a), len(b))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer, which encodes any bytes and whose first id is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(modules: list[Module], tokenizer: Tokenizer) -> np.ndarray:
    """Returns the tokens of all modules, [tokens] uint16. The end-of-text token precedes each module."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    parts = [[end_of_text, *e.ids] for e in tokenizer.encode_batch([m.text for m in modules])]
    return np.concatenate([np.array(p, dtype=np.uint16) for p in parts])


def heldout_prompts(held_out: list[Module], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Returns prompts of 100 to 250 tokens in whole lines, which begin with a module or a top-level
    definition."""
    candidates = [(f"{m.path}:{line}", m, line) for m in held_out for line in _top_level_lines(m.text)]
    prompts: list[dict[str, str]] = []
    for place, module, line in sorted(candidates, key=lambda c: _hash(c[0])):
        text = _whole_lines("".join(module.text.splitlines(keepends=True)[line - 1 :]), place, tokenizer)
        if text is not None and len(prompts) < NUM_PROMPTS:
            prompts.append({"path": place, "text": text})
    return sorted(prompts, key=lambda p: p["path"])


def _top_level_lines(text: str) -> Iterator[int]:
    """Yields line 1 and the first line, including decorators, of each top-level function and class."""
    yield 1
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _whole_lines(text: str, place: str, tokenizer: Tokenizer) -> str | None:
    """Returns the most whole lines within a length that the place's hash determines; None if they are too
    few."""
    low, high = PROMPT_TOKENS
    ids = tokenizer.encode(text).ids
    limit = low + _hash(place) // HELD_OUT_MODULUS % (high - low + 1)
    if len(ids) < 2 * high:
        return None
    prompt = tokenizer.decode(ids[: max(limit, low + 28)]).rpartition("\n")[0] + "\n"
    is_long_enough = low <= len(tokenizer.encode(prompt).ids) <= high
    return prompt if is_long_enough and text.startswith(prompt) and is_valid_so_far(prompt) else None


def is_valid_so_far(text: str) -> bool:
    """Returns whether the text raises no SyntaxError up to its last complete line. An unfinished statement is
    valid."""
    complete_lines = text[: text.rfind("\n") + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            codeop.compile_command(complete_lines, symbol="exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return True


def prepare(out: Path) -> None:
    """Writes library.npy, tests.npy, heldout.json, tokenizer.json, heldout_prompts.json and corpus.json."""
    out.mkdir(parents=True, exist_ok=True)
    modules = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    train, held_out, dropped = split(modules)
    random.Random(0).shuffle(train)
    tokenizer = train_tokenizer(m.text for m in train)
    tokenizer.save(str(out / "tokenizer.json"))
    streams = {
        "library": token_stream([m for m in train if not m.is_test], tokenizer),
        "tests": token_stream([m for m in train if m.is_test], tokenizer),
    }
    for name, stream in streams.items():
        np.save(out / f"{name}.npy", stream)
    _write_json(out / "heldout.json", [{"path": m.path, "text": m.text} for m in held_out])
    _write_json(out / "heldout_prompts.json", heldout_prompts(held_out, tokenizer))
    counts = Counter({f"{name}_tokens": len(stream) for name, stream in streams.items()})
    facts = {
        "python_version": PYTHON_VERSION,
        "sha256": CORPUS_SHA256,
        "modules": len(modules),
        "bytes": sum(len(m.text.encode()) for m in modules),
        "train_bytes": sum(len(m.text.encode()) for m in train),
        **counts,
        "heldout_bytes": sum(len(m.text.encode()) for m in held_out),
        "heldout_modules": [m.path for m in held_out],
        "near_duplicates_dropped": dropped,
    }
    _write_json(out / "corpus.json", facts)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the prepared data")
    prepare(parser.parse_args().out)
