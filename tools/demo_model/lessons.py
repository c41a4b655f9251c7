"""The lesson at each token of a training window: to learn the token, to unlearn it, or to ignore it.

A line that a text has repeated recently must not be repeated again. Knows token ids, not the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from demo_model.corpus import Corpus, Tokens

LEARN, IGNORE, UNLEARN = 1, 0, -1
Lessons = npt.NDArray[np.int8]

MAX_STUTTER = 3  # the most lines that are repeated together, and the most repetitions
REACH = 200  # the most tokens between the first and the third copy of a line
ECHOES = 5  # repeated blocks of lines per window
MAX_ECHO = 6  # the most lines of a block, and the most copies of it in all
MAX_ECHO_TOKENS = 120  # of a block
EARLIEST_ECHO = 8  # lines between the window's begin and the first repetition
LATEST_ECHO = 6  # lines between the last repetition and the window's end
MAX_RELAPSE = 4  # lines until a block is repeated once more
SALT = np.random.default_rng(7).integers(1, 2**62, 4096)  # [tokens of a line], for hashes of lines


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a window; each field is [lines] int64."""

    starts: Tokens
    lengths: Tokens
    keys: Tokens  # equal for lines of the same content (a hash); 0 for blank lines

    @staticmethod
    def of(ids: Tokens, corpus: Corpus) -> Lines:
        """Returns the lines of ids, [tokens]. A newline belongs to the line that it ends; indentation is no
        content."""
        starts = np.concatenate([[0], np.flatnonzero(ids[:-1] == corpus.newline) + 1])
        lengths = np.diff(starts, append=len(ids))
        is_content = corpus.is_content[ids]
        before: Tokens = np.cumsum(is_content) - is_content
        offset: Tokens = before - np.repeat(before[starts], lengths)
        hashed = np.where(is_content, (ids + 1) * SALT[offset], 0)
        return Lines(starts, lengths, np.add.reduceat(hashed, starts))


def third_copies(keys: Tokens, starts: Tokens) -> npt.NDArray[np.bool_]:
    """Returns whether a line's content occurs twice in the REACH tokens before it. All arrays are [lines].
    Keys 5 9 5 5 at starts 0 10 20 300 have no third copy; at starts 0 10 20 100 the last line is one."""
    by_key = np.argsort(keys, kind="stable")
    key, start = keys[by_key], starts[by_key]
    found = np.zeros(len(keys), dtype=np.bool_)
    found[by_key[2:]] = (key[2:] == key[:-2]) & (key[2:] != 0) & (start[2:] - start[:-2] <= REACH)
    return found


def stutter(ids: Tokens, newline: int, rng: np.random.Generator) -> tuple[Tokens, Lessons]:
    """Repeats one to three of the window's lines one to three times; the repetitions are not learnt, only the
    text after them. ids: [length]. Returns (ids, lessons), [length] each."""
    lessons = np.full(len(ids), LEARN, dtype=np.int8)
    ends = np.flatnonzero(ids == newline) + 1
    if len(ends) <= MAX_STUTTER:
        return ids, lessons
    last = rng.integers(MAX_STUTTER, len(ends))
    begin, end = ends[last - rng.integers(1, MAX_STUTTER + 1)], ends[last]
    echo = np.tile(ids[begin:end], rng.integers(1, MAX_STUTTER + 1))
    lessons[end : end + len(echo)] = IGNORE
    return np.concatenate([ids[:end], echo, ids[end:]])[: len(ids)], lessons


def own_text_lessons(ids: Tokens, corpus: Corpus) -> Lessons:
    """Returns the lessons of the model's own text, [length]: third copies are unlearnt, the rest is
    ignored."""
    lines = Lines.of(ids, corpus)
    is_third = np.repeat(third_copies(lines.keys, lines.starts), lines.lengths)
    return np.where(is_third & corpus.is_content[ids], UNLEARN, IGNORE).astype(np.int8)


def echoed(
    ids: Tokens, corpus: Corpus, rng: np.random.Generator, *, is_corpus_spared: bool
) -> tuple[Tokens, Lessons]:
    """Returns (the window with some of its lines repeated, its lessons), [length] each. ids: [length].

    The corpus is learnt, repetitions are not, and third copies among them are unlearnt. is_corpus_spared: a
    third copy in the corpus itself is ignored instead of learnt.
    """
    lines = Lines.of(ids, corpus)
    before, said = _echoes(lines, rng)
    order = np.insert(np.arange(len(lines.starts)), before, said)
    is_echo = np.insert(np.zeros(len(lines.starts), dtype=np.bool_), before, True)
    lengths = lines.lengths[order]
    starts = np.cumsum(lengths) - lengths
    is_third = third_copies(lines.keys[order], starts)

    source = np.repeat(lines.starts[order] - starts, lengths) + np.arange(lengths.sum())
    in_echo, in_third = np.repeat(is_echo, lengths), np.repeat(is_third, lengths)
    in_third &= corpus.is_content[ids[source]]
    lessons = np.where(in_echo, IGNORE, LEARN).astype(np.int8)
    lessons[in_third & in_echo] = UNLEARN
    if is_corpus_spared:
        lessons[in_third & ~in_echo] = IGNORE
    return ids[source][: len(ids)], lessons[: len(ids)]


def _echoes(lines: Lines, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Returns (the lines before which to repeat, the lines to repeat), [repeated lines] int64 each."""
    count = len(lines.starts)
    before, said = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    if count > EARLIEST_ECHO + LATEST_ECHO + ECHOES:
        for last in rng.choice(np.arange(EARLIEST_ECHO, count - LATEST_ECHO), ECHOES, replace=False):
            block = np.arange(last - min(rng.geometric(0.45), MAX_ECHO), last)
            if lines.lengths[block].sum() > MAX_ECHO_TOKENS:
                continue
            echo = np.tile(block, rng.integers(1, MAX_ECHO))
            if len(block) > 1 and rng.random() < 0.5:  # half of the lines give way to others
                echo = np.where(rng.random(len(echo)) < 0.5, rng.integers(0, count - 1, len(echo)), echo)
            said.append(echo)
            before.append(np.full(len(echo), last))
            if rng.random() < 0.4:
                said.append(block)
                before.append(np.full(len(block), last + rng.integers(1, MAX_RELAPSE + 1)))
    return np.concatenate(before), np.concatenate(said)
