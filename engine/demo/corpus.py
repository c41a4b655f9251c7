"""The prepared corpus as training sees it: two token streams, and windows drawn from them at random."""

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

    streams: tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]
    library_share: float
    newline: int
    is_space: npt.NDArray[np.bool_]  # [vocab]: tokens of blanks and tabs alone

    @staticmethod
    def read(data: Path, library_share: float) -> Corpus:
        """From a folder written by headway.engine.demo.prepare."""
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        newline = tokenizer.encode("\n").ids[0]
        said = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        is_space = np.array([text.isspace() and i != newline for i, text in enumerate(said)])
        library, tests = (np.load(data / f"{name}.npy") for name in ("library", "tests"))
        return Corpus((library, tests), library_share, newline, is_space)

    def window(self, length: int, rng: np.random.Generator) -> Tokens:
        """So many tokens in a row from anywhere."""
        stream = self.streams[rng.random() >= self.library_share]
        start = rng.integers(len(stream) - length)
        return stream[start : start + length].astype(np.int64)

    def windows(self, rows: int, length: int, rng: np.random.Generator) -> Tokens:  # [rows, length]
        return np.stack([self.window(length, rng) for _ in range(rows)])

    def prompts(self, rows: int, length: int, rng: np.random.Generator) -> Tokens:
        """Windows that end where a line does.  # [rows, length]"""
        drawn: list[Tokens] = []
        while len(drawn) < rows:
            window = self.window(2 * length, rng)
            ends = np.flatnonzero(window[length - 1 :] == self.newline)
            if len(ends):
                drawn.append(window[ends[0] : ends[0] + length])
        return np.stack(drawn)
