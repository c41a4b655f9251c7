"""The prepared corpus for training: two token streams, and windows drawn from them at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Library code and its tests, each one stream of tokens; a share of the windows is library code."""

    library: npt.NDArray[np.uint16]
    tests: npt.NDArray[np.uint16]
    library_share: float
    newline: int
    is_content: npt.NDArray[np.bool_]  # [vocab]: tokens that are not only whitespace

    @staticmethod
    def read(data: Path, library_share: float) -> Corpus:
        """Reads a folder written by demo_model.prepare."""
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        said = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        library, tests = (np.load(data / f"{name}.npy") for name in ("library", "tests"))
        newline = tokenizer.encode("\n").ids[0]
        return Corpus(library, tests, library_share, newline, np.array([not text.isspace() for text in said]))

    def window(self, length: int, rng: np.random.Generator) -> Tokens:
        """Returns consecutive tokens from a random start, [length] int64."""
        stream = self.library if rng.random() < self.library_share else self.tests
        start = rng.integers(len(stream) - length)
        return stream[start : start + length].astype(np.int64)

    def prompts(self, rows: int, length: int, rng: np.random.Generator) -> Tokens:
        """Returns windows that end with a line, [rows, length] int64."""
        drawn: list[Tokens] = []
        while len(drawn) < rows:
            window = self.window(3 * length, rng)
            ends = np.flatnonzero(window[length - 1 :] == self.newline)
            if len(ends):
                drawn.append(window[ends[0] : ends[0] + length])
        return np.stack(drawn)
