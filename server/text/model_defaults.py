"""Defaults from a model's files for fields that a request leaves unset: special tokens and sampling.

Each value is checked once, at start, by the rules for requests. An invalid one is left out with a warning, so
that no client gets an error about a field that it did not send.
"""

from __future__ import annotations

import logging
import math
import reprlib
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as HFTokenizer

from headway.engine import MAX_STOP_TOKEN_IDS, ModelError, SamplingParams, read_json_object
from headway.server.base.errors import ApiError
from headway.server.protocol.parameters import RANGES, GenerationFields, check_generation

SAMPLING_KEYS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
MIN_CHARACTERS = 4  # the letters of DNA, the smallest alphabet of any model
# A character of private use, for which a vocabulary has the unknown token at most.
NOBODYS_CHARACTER = "\U0010fffd"
MAX_NAMES_SHOWN = 4

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """start_token_id, end_token_id: those of the tokenizer; None if it has none. adds_start_token: None if
    tokenizer_config.json leaves this to tokenizer.json. stop_token_ids: ascending, at most
    MAX_STOP_TOKEN_IDS."""

    start_token_id: int | None
    end_token_id: int | None
    adds_start_token: bool | None
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams


def read_model_defaults(folder: Path, tokenizer: HFTokenizer, vocab_size: int | None) -> ModelDefaults:
    """vocab_size: the model's; None if it is unknown. Raises ModelError for broken files."""
    file = folder / "tokenizer_config.json"
    config = read_tokenizer_config(folder)
    generation = read_json_object(folder / "generation_config.json") or {}
    start, end = (
        _special_token(file, key, config.get(key), tokenizer, vocab_size)
        for key in ("bos_token", "eos_token")
    )
    adds_start = config.get("add_bos_token")
    return ModelDefaults(
        start_token_id=start,
        end_token_id=end,
        adds_start_token=adds_start if isinstance(adds_start, bool) else None,
        stop_token_ids=_stop_token_ids(folder, generation, end, vocab_size),
        sampling=_sampling(folder / "generation_config.json", generation),
    )


def read_tokenizer_config(folder: Path) -> dict[str, object]:
    """Returns tokenizer_config.json. As in transformers, the special tokens of special_tokens_map.json
    override it, unless it lists the added tokens. Raises ModelError."""
    config = read_json_object(folder / "tokenizer_config.json") or {}
    if "added_tokens_decoder" in config:
        return config
    return config | (read_json_object(folder / "special_tokens_map.json") or {})


def token_content(token: object) -> str | None:
    """Returns the text of a special token in these files: a string, or the `content` of an object. None
    for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def check_writes(file: Path, tokenizer: HFTokenizer) -> None:
    """file: tokenizer.json. Raises ModelError if hardly any text can be written by it, so that every
    prompt would be empty."""
    nothing = set(tokenizer.encode(NOBODYS_CHARACTER, add_special_tokens=False).ids)
    characters = string.ascii_letters + string.digits
    found = tokenizer.encode_batch(list(characters), add_special_tokens=False)
    num_written = sum(not set(encoding.ids) <= nothing for encoding in found)
    if num_written < MIN_CHARACTERS:
        raise ModelError(
            f"{file} has {tokenizer.get_vocab_size():,} entries, which write {num_written} of the {len(characters)} letters and "
            f"digits, the least is {MIN_CHARACTERS}; fetch the model's tokenizer.json again"
        )


def check_vocabulary(file: Path, tokenizer: HFTokenizer, vocab_size: int) -> None:
    """file: tokenizer.json. Raises ModelError if ordinary text would have ids that the model does not know.

    Special tokens beyond the vocabulary, often for padding, occur in real folders: no text has them by
    chance.
    """
    added = tokenizer.get_added_tokens_decoder()
    ordinary = [*tokenizer.get_vocab(with_added_tokens=False).values()]
    ordinary += [token_id for token_id, token in added.items() if not token.special]
    greatest = max(ordinary, default=-1)
    if greatest >= vocab_size:
        raise ModelError(
            f"{file} has token ids up to {greatest:,}, the limit is {vocab_size - 1:,} (vocab_size of config.json is "
            f"{vocab_size:,}); take tokenizer and config.json of one model"
        )
    around = [token_id for token_id in tokenizer.encode("").ids if token_id >= vocab_size]
    if around:
        raise ModelError(
            f"{file} puts token id {around[0]:,} around every text, the limit is {vocab_size - 1:,} (vocab_size of "
            f"config.json is {vocab_size:,}); take tokenizer and config.json of one model"
        )
    beyond = [f"{token.content!r} ({i})" for i, token in sorted(added.items()) if i >= vocab_size]
    if beyond:
        more = f" and {len(beyond) - MAX_NAMES_SHOWN} more" if len(beyond) > MAX_NAMES_SHOWN else ""
        logger.warning(
            "%s: special tokens %s%s are beyond the model's vocabulary, the limit is %d; prompts that have them are "
            "refused",
            file, ", ".join(beyond[:MAX_NAMES_SHOWN]), more, vocab_size - 1,
        )  # fmt: skip


def _special_token(
    file: Path, key: str, token: object, tokenizer: HFTokenizer, vocab_size: int | None
) -> int | None:
    """Returns the id of a special token, given as a string or as an object with `content`; None with a
    warning if it is invalid."""
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    if not isinstance(content, str):
        _warn(file, key, token, "it must be a string or null")
        return None
    token_id = tokenizer.token_to_id(content)
    if token_id is None:
        _warn(file, key, content, "it must be a token of tokenizer.json")
    elif vocab_size is not None and token_id >= vocab_size:
        _warn(file, key, content, f"its id {token_id} must be {_ids_allowed(vocab_size)}")
        return None
    return token_id


def _stop_token_ids(
    folder: Path, generation: Mapping[str, object], end: int | None, vocab_size: int | None
) -> tuple[int, ...]:
    """Returns the tokenizer's end, and the ids of generation_config.json or else of config.json."""
    file = folder / "generation_config.json"
    stop = _ids(file, generation.get("eos_token_id"), vocab_size)
    if not stop:
        file = folder / "config.json"
        config = read_json_object(file) or {}
        text = config.get("text_config")  # the part for text in the configuration of a model with images
        outer = config.get("eos_token_id")
        inner = text.get("eos_token_id") if isinstance(text, dict) else None
        stop = _ids(file, inner if outer is None else outer, vocab_size)
    stop = list(dict.fromkeys(stop if end is None else [end, *stop]))
    if len(stop) > MAX_STOP_TOKEN_IDS:
        _warn(file, "eos_token_id", stop[MAX_STOP_TOKEN_IDS:], f"it may have {MAX_STOP_TOKEN_IDS} ids")
    return tuple(sorted(stop[:MAX_STOP_TOKEN_IDS]))


def _ids(file: Path, value: object, vocab_size: int | None) -> list[int]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    limit = math.inf if vocab_size is None else vocab_size
    found = []
    for token_id in values:
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < limit:
            found.append(token_id)
        else:
            _warn(file, "eos_token_id", token_id, f"a token id must be {_ids_allowed(vocab_size)}")
    return found


def _ids_allowed(vocab_size: int | None) -> str:
    return "0 or more" if vocab_size is None else f"0 to {vocab_size - 1} (the vocabulary)"


def _sampling(file: Path, generation: Mapping[str, object]) -> SamplingParams:
    """Returns the defaults of generation_config.json, and OpenAI's for what it leaves out. do_sample has
    no effect, as in vLLM: a temperature of 0 is greedy."""
    fields = {key: _field(file, key, generation.get(key)) for key in SAMPLING_KEYS}
    given = {key: value for key, value in fields.items() if value is not None}
    if given.get("top_k", 0) < 0:
        given["top_k"] = 0
    return msgspec.convert(given, SamplingParams)


def _field(file: Path, key: str, value: object) -> float | None:
    """Returns the value; None with a warning if no request may have it."""
    if value is None:
        return None
    try:
        fields = msgspec.convert({key: value}, GenerationFields)
        check_generation(fields)
    except ApiError as error:
        logger.warning("%s: %s; it is left out", file, error)
        return None
    except msgspec.ValidationError:
        low, high = RANGES[key]
        kind = "a whole number" if key == "top_k" else "a number"
        _warn(file, key, value, f"it must be {kind} from {low} to {high}")
        return None
    number: float = getattr(fields, key)
    return number


def _warn(file: Path, key: str, value: object, limit: str) -> None:
    logger.warning("%s: %s is %s, %s; it is left out", file, key, reprlib.repr(value), limit)
