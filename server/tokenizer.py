"""A model folder's tokenizer and what else its files say about text: special tokens, default sampling.

Reads tokenizer.json, tokenizer_config.json, generation_config.json and config.json; runs none of their code.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers

from headway.engine import ModelError, SamplingParams
from headway.server.control_text import ChatPrompt, control_pattern
from headway.server.detokenizer import Vocabulary

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


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ModelError for files that are missing or broken."""
    path = folder / "tokenizer.json"
    if not path.is_file():
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
    config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    end = _token_id(tokenizer, config.get("eos_token"))
    stop = _ids(generation.get("eos_token_id")) or _ids(read_json(folder / "config.json").get("eos_token_id"))
    start = _token_id(tokenizer, config.get("bos_token"))
    adds_start = config.get("add_bos_token")
    return Tokenizer(
        vocabulary=Vocabulary(tokenizer),
        full_vocabulary=Vocabulary(tokenizer, shows_special=True),
        speller=Speller(tokenizer),
        max_token_bytes=_max_token_bytes(tokenizer),
        control_pattern=control_pattern(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        ),
        start_token_id=start if start is not None else end,
        adds_start_token=adds_start if isinstance(adds_start, bool) and start is not None else None,
        stop_token_ids=tuple(sorted({*stop, *([] if end is None else [end])})),
        default_sampling=_default_sampling(generation),
    )


def read_json(path: Path) -> JsonObject:
    """A file of the folder that may be missing. Raises ModelError if it is broken."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, it must be an object")
    return content


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


def _token_id(tokenizer: HFTokenizer, token: object) -> int | None:
    """A special token in tokenizer_config.json is a string, or an object with its string in `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _default_sampling(generation: JsonObject) -> SamplingParams:
    """The model's own defaults where generation_config.json names them, OpenAI's elsewhere."""
    neutral = SamplingParams()

    def number(name: str, default: float) -> float:
        value = generation.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    return SamplingParams(
        repetition_penalty=number("repetition_penalty", neutral.repetition_penalty),
        temperature=number("temperature", neutral.temperature),
        top_p=number("top_p", neutral.top_p),
        top_k=max(0, int(number("top_k", neutral.top_k))),
        min_p=number("min_p", neutral.min_p),
    )
