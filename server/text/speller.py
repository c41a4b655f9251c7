"""Encodes chats so that structural tokens come from the template alone; a client's spelling of one is
ordinary text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

_DRAWS = 100  # attempts at a secret; a tokenizer may have each digit as an added token


class Speller:
    """Encodes chats in which only the template's structural tokens become tokens. Mutable: makes a copy of
    the tokenizer at first use, and is its only writer.

    The copy shares the original's vocabulary, but has each structural token under an unguessable name. A chat
    is therefore encoded as a whole, without seams, and what a client spells is text like any other.
    """

    def __init__(
        self, tokenizer: HFTokenizer, pattern: re.Pattern[str] | None, *, begins_text: bool = True
    ) -> None:
        """begins_text: False for texts that go on, which get no leading space, whatever the tokenizer does
        otherwise."""
        # Tokens that are searched in normalised text can be spelled in ways that no pattern matches.
        self.is_always_needed = _has_normalizer(tokenizer) and any(
            token.normalized and pattern is not None and pattern.fullmatch(token.content) is not None
            for token in tokenizer.get_added_tokens_decoder().values()
        )
        self._original = tokenizer
        self._pattern = pattern
        self._begins_text = begins_text
        self._copy: RenamedTokenizer | None = None

    def encode(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Returns the ids of pieces of text, each with whether structural tokens in it are only spelled.
        Blocks."""
        if self._copy is None:
            self._copy = _renamed(self._original, self._pattern, begins_text=self._begins_text)
        return self._copy.encode(pieces)


@dataclass(frozen=True, slots=True)
class RenamedTokenizer:
    """names: the copy's name of each structural token. ids: the original's id of each added token in the
    copy."""

    tokenizer: HFTokenizer
    pattern: re.Pattern[str] | None
    names: dict[str, str]
    ids: dict[int, int]
    structural: dict[int, str]

    def encode(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        return self._encode("".join(text if is_spelled else self._named(text) for text, is_spelled in pieces))

    def _named(self, text: str) -> str:
        return text if self.pattern is None else self.pattern.sub(lambda match: self.names[match[0]], text)

    def _encode(self, text: str) -> list[int]:
        """Encodes a text. A few models (Unigram) form a structural token from text although it is no added
        token: the text is then cut there."""
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        cuts = [0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_added = token_id in self.ids
            if not is_added and end - start > 1 and self.structural.get(token_id) == text[start:end]:
                cuts.append((start + end) // 2)
        if len(cuts) == 1:
            return [self.ids.get(token_id, token_id) for token_id in encoding.ids]
        spans = zip(cuts, [*cuts[1:], len(text)], strict=True)
        return [token_id for start, end in spans for token_id in self._encode(text[start:end])]


def _has_normalizer(tokenizer: HFTokenizer) -> bool:
    normalizer = tokenizer.normalizer
    return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []


def _renamed(
    original: HFTokenizer, pattern: re.Pattern[str] | None, *, begins_text: bool
) -> RenamedTokenizer:
    added = sorted(original.get_added_tokens_decoder().items())
    contents = {token.content for _, token in added}
    structural = {i: t.content for i, t in added if pattern is not None and pattern.fullmatch(t.content)}
    names = {content: _secret(contents) for content in structural.values()}
    copy = HFTokenizer(original.model)
    model_of = original if begins_text else _without_first_space(original)
    if model_of.normalizer is not None:
        copy.normalizer = model_of.normalizer
    if model_of.pre_tokenizer is not None:
        copy.pre_tokenizer = model_of.pre_tokenizer
    # New tokens get ids from the vocabulary's size on. If the vocabulary has gaps, some of these are in use,
    # so that the gaps are filled first.
    used = original.get_vocab(with_added_tokens=False).values()
    gap = _secret(contents)
    copy.add_tokens([f"{gap}{i}" for i in range(max(used, default=-1) + 1 - len(used))])
    tokens = [
        AddedToken(
            names.get(token.content, token.content),
            single_word=token.single_word and token.content not in names,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        for _, token in added
    ]
    copy.add_tokens(tokens)
    pairs = [(copy.token_to_id(new.content), i) for new, (i, _) in zip(tokens, added, strict=True)]
    ids = {new_id: i for new_id, i in pairs if new_id is not None}
    assert len(ids) == len(added), "each added token has an id of its own in the copy"
    return RenamedTokenizer(copy, pattern, names, ids, structural)


def _secret(contents: set[str]) -> str:
    """Returns a secret that no client can guess, and that contains no added token if possible, which would
    be found there."""
    for _ in range(_DRAWS):
        secret = f"~{secrets.randbelow(10**18):018}~"
        if not any(text in secret for text in contents):
            break
    return secret


def _without_first_space(original: HFTokenizer) -> HFTokenizer:
    """Returns a tokenizer without vocabulary whose normalizer and pre-tokenizer put nothing before a text."""
    state = {
        name: None if part is None else _spaceless(json.loads(part.__getstate__()))
        for name, part in (("normalizer", original.normalizer), ("pre_tokenizer", original.pre_tokenizer))
    }
    model = {"type": "WordLevel", "vocab": {}, "unk_token": "?"}
    return HFTokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | state))


def _spaceless(part: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the state of a normalizer or pre-tokenizer that adds no space; None if adding one was all it
    did."""
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return part | {"add_prefix_space": False}
    changed = dict(part)
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            changed[name] = [kept for entry in part[name] if (kept := _spaceless(entry)) is not None]
    return changed
