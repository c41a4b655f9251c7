"""Finds positions at which a text can be cut so that the ids of its pieces, joined, are those of the whole
text.

Byte-level BPE: the pre-tokenizer scans from left to right and keeps no state between two matches. After a
letter and before a space, a line break or one of a few punctuation marks, each of the patterns below ends a
match, whatever is around. BPE without a pre-tokenizer (SentencePiece's): no merge crosses a position that no
token of the vocabulary spans. Both hold only if no normalizer and no added token looks across the position;
all other tokenizers get no cuts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

PIECE_CHARACTERS = 1 << 14
_WINDOW_CHARACTERS = (
    1 << 16
)  # characters that one call searches, so that no search holds the interpreter lock for long

# Latin, Cyrillic, Hiragana, Katakana, ideographs, Hangul
_LETTER = r"[A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
_AFTER_LETTERS = re.compile(_LETTER + r"(?=[ \n.,;:!?()\u3001\u3002\uff01\uff0c\uff1f])")
_BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
_SPACE_MARK = "▁"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_PREFIX, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
# Published pre-tokenizers. It was checked for each alternative that no match contains a letter followed by
# one of the characters in _AFTER_LETTERS.
KNOWN_PATTERNS = frozenset(
    pattern.replace(r"\r", "\r").replace(r"\n", "\n")
    for pattern in (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3 and Qwen
        *(
            _CONTRACTION
            + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        # GPT-4o and gpt-oss
        (
            f"{_O200K_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_O200K_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        # DeepSeek V3: three in a row
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        # the embedded model
        r"\n| ?[\p{L}_][\p{L}\p{N}_]*| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+",
    )
)


@dataclass(frozen=True, slots=True)
class TextCuts:
    """place: matches the character before a cut. drops_space: the space after a cut is left out, because
    the normalizer puts one before every piece."""

    place: re.Pattern[str]
    drops_space: bool = False

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of consecutive pieces of about PIECE_CHARACTERS, which cover the text."""
        start = 0
        while start < len(text):
            end = self._first(text, start + PIECE_CHARACTERS, len(text)) or len(text)
            yield start, end
            start = end

    def spans_from_end(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of consecutive pieces, the last one first."""
        end = len(text)
        while end > 0:
            low = high = end
            start: int | None = None
            while start is None:
                low = max(0, high - PIECE_CHARACTERS)
                start = 0 if low == 0 else self._first(text, low, min(high + 1, end))
                high = low
            yield start, end
            end = start

    def piece(self, text: str, start: int, end: int) -> str:
        return text[start + self.num_dropped(start) : end]

    def num_dropped(self, start: int) -> int:
        return int(self.drops_space and start > 0)

    def _first(self, text: str, low: int, high: int) -> int | None:
        """Returns the first cut in low < cut < high."""
        for begin in range(low, high, _WINDOW_CHARACTERS):
            end = min(begin + _WINDOW_CHARACTERS + 2, high)
            if match := self.place.search(text, begin, end):
                return match.end()
        return None


def find_cuts(state: Mapping[str, object], vocabulary: Iterable[str]) -> TextCuts | None:
    """Returns the cuts; None if nothing is proven about the tokenizer. state: a tokenizer.json without its
    vocabulary. vocabulary: the tokens that merges make."""
    model, normalizer, splitter = state["model"], state["normalizer"], state["pre_tokenizer"]
    added = state["added_tokens"]
    assert isinstance(model, dict)
    assert isinstance(added, list)
    if model.get("type") != "BPE" or model.get("dropout") or any(_looks_around(token) for token in added):
        return None
    if _is_known_byte_level(splitter):
        return TextCuts(_AFTER_LETTERS) if _is_none_or_nfc(normalizer) else None
    if _is_spaces_alone(splitter) and not model.get("ignore_merges"):
        prepends = _space_normalizer(normalizer)
        spans_words = any(
            _SPACE_MARK in token.lstrip(_SPACE_MARK) and _joins_words(token) for token in vocabulary
        )
        if prepends is not None and not spans_words:
            return TextCuts(_BETWEEN_WORDS, drops_space=prepends)
    return None


def _looks_around(token: Mapping[str, object]) -> bool:
    """Returns whether an added token takes spaces around it, depends on its neighbours, or could lie
    across a cut."""
    content = str(token["content"])
    if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
        return True
    return bool(_AFTER_LETTERS.search(content)) or not content or content[0] == " " or content[0].isalpha()


def _is_known_byte_level(splitter: object) -> bool:
    steps = _steps(splitter, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return False
    if len(steps) == 1:
        return bool(steps[0].get("use_regex"))  # the pattern of GPT-2
    return all(_is_known_step(step) for step in steps[:-1])


def _is_known_step(step: Mapping[str, object]) -> bool:
    if step.get("type") == "Digits":
        return True
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if step.get("type") != "Split" or not isinstance(regex, str):
        return False
    keeps_all = (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True))
    return keeps_all and regex.replace(r"\r", "\r").replace(r"\n", "\n") in KNOWN_PATTERNS


def _is_none_or_nfc(normalizer: object) -> bool:
    return all(step.get("type") == "NFC" for step in _steps(normalizer, "normalizers"))


def _is_spaces_alone(splitter: object) -> bool:
    """Returns whether there is no pre-tokenizer, or Gemma's, which splits at spaces that its normalizer
    has replaced before."""
    steps = _steps(splitter, "pretokenizers")
    return all(step.get("type") == "Split" and step.get("pattern") == {"String": " "} for step in steps)


def _space_normalizer(normalizer: object) -> bool | None:
    """Returns whether a normalizer that replaces spaces by marks also puts one first; None for any other
    normalizer."""
    steps = [dict(step) for step in _steps(normalizer, "normalizers")]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    if steps == [replace]:
        return False
    return True if steps == [{"type": "Prepend", "prepend": _SPACE_MARK}, replace] else None


def _joins_words(token: str) -> bool:
    return re.search(f"[A-Za-z]{_SPACE_MARK}", token) is not None


def _steps(part: object, name: str) -> Sequence[Mapping[str, object]]:
    """Returns the steps of a sequence, of a single step, or of nothing."""
    if not isinstance(part, dict):
        return []
    steps = part[name] if part.get("type") == "Sequence" else [part]
    assert isinstance(steps, list)
    return steps
