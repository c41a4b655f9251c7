"""A model folder's tokenizer, and beside it what its files say of requests that leave it open (model_defaults.py)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers

from headway.engine import MAX_TOKENIZER_BYTES, ModelError, SamplingParams, is_regular_file
from headway.server.control_text import ChatPrompt, control_pattern
from headway.server.detokenizer import Vocabulary
from headway.server.model_defaults import check_vocabulary, read_model_defaults

JsonObject = dict[str, object]
MAX_NFC_SHRINKING = 3  # 9 bytes of Hangul letters become a syllable of 3, and no composition shrinks more
KEEPING_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class Speller:
    """Control tokens as the text that they are spelled with. Mutable: a copy of the tokenizer, made at first use."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._original = tokenizer
        self._copy: HFTokenizer | None = None

    def encode(self, text: str) -> list[int]:
        if self._copy is None:
            copy = HFTokenizer.from_str(self._original.to_str())
            copy.encode_special_tokens = True
            self._copy = copy
        return list(self._copy.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to ids. start_token_id: put before prompts (the model asks for it) or in place of an empty one.

    full_vocabulary: the one that also shows special tokens. control_pattern: finds those in a text.
    max_token_bytes: of a prompt's text that one token stands for; None where no such bound is known.
    """

    vocabulary: Vocabulary
    full_vocabulary: Vocabulary
    speller: Speller
    max_token_bytes: int | None
    control_pattern: re.Pattern[str] | None
    start_token_id: int | None
    adds_start_token: bool | None
    stop_token_ids: tuple[int, ...]
    default_sampling: SamplingParams

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt; blocks, for about a second per 5 MB."""
        follows_file = self.adds_start_token is None
        ids = self.vocabulary.tokenizer.encode(text, add_special_tokens=follows_file).ids
        if self.adds_start_token and self.start_token_id is not None and ids[:1] != [self.start_token_id]:
            ids = [self.start_token_id, *ids]
        if not ids and self.start_token_id is not None:
            return [self.start_token_id]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a piece of text, with nothing put around it."""
        return list(self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)

    def least_tokens(self, text: str) -> int:
        """So many tokens at least has the text, known without encoding it."""
        return -(-len(text.encode()) // self.max_token_bytes) if self.max_token_bytes else 0

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """The ids of a rendered chat, around which nothing is put: the template wrote all that belongs there."""
        pieces = list(prompt.pieces())
        encoded = [
            self.speller.encode(text) if spells else self.encode_plain(text) for text, spells in pieces
        ]
        return [token_id for ids in encoded for token_id in ids]

    def decode(self, token_ids: list[int]) -> str:
        return self.vocabulary.decode(token_ids)


def load_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    """vocab_size: of the model, which ids are held against; None where none is known. Raises ModelError for files that
    are missing or broken."""
    path = folder / "tokenizer.json"
    if not is_regular_file(path, max_bytes=MAX_TOKENIZER_BYTES):
        raise ModelError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
        )
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if vocab_size is not None:
        check_vocabulary(path, tokenizer, vocab_size)
    defaults = read_model_defaults(folder, tokenizer, vocab_size)
    start, end = defaults.start_token_id, defaults.end_token_id
    return Tokenizer(
        vocabulary=Vocabulary(tokenizer),
        full_vocabulary=Vocabulary(tokenizer, shows_special=True),
        speller=Speller(tokenizer),
        max_token_bytes=_max_token_bytes(tokenizer),
        control_pattern=control_pattern(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        ),
        start_token_id=start if start is not None else end,
        adds_start_token=None if start is None else defaults.adds_start_token,
        stop_token_ids=defaults.stop_token_ids,
        default_sampling=defaults.sampling,
    )


def _max_token_bytes(tokenizer: HFTokenizer) -> int | None:
    """Only for byte-level tokenizers that lose nothing of a text: one character of a token is one byte of it."""
    normalizer = tokenizer.normalizer
    added = tokenizer.get_added_tokens_decoder().values()
    plain = tokenizer.get_vocab(with_added_tokens=False)
    is_lossless = (
        isinstance(tokenizer.model, models.BPE)
        and (normalizer is None or isinstance(normalizer, normalizers.NFC))
        and not any(token.lstrip or token.rstrip for token in added)
        and _keeps_all(json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer else {})
    )
    if not is_lossless:
        return None
    longest = max([1, *(len(token.content.encode()) for token in added), *map(len, plain)])
    return longest if normalizer is None else MAX_NFC_SHRINKING * longest


def _keeps_all(pre_tokenizer: JsonObject) -> bool:
    """It ends in the byte-level one, and nothing before that drops characters."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    assert isinstance(steps, list), pre_tokenizer
    keeps = [
        s["type"] in ("ByteLevel", "Digits") or s.get("behavior") in KEEPING_BEHAVIORS for s in steps if s
    ]
    return bool(keeps) and all(keeps) and steps[-1]["type"] == "ByteLevel"
