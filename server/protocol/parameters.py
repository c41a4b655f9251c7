"""The fields that requests share: how to generate, and how to answer.

null means the default, as everywhere in OpenAI's API.
"""

from __future__ import annotations

import msgspec

from headway.engine import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from headway.server.base.errors import ApiError
from headway.server.protocol.checks import check_count, check_range, check_strings, require
from headway.server.protocol.structured import JsonSchema, ResponseFormat, StructuredOutputs

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_CACHE_SALT_CHARACTERS = 256
MAX_INTEGER = 2**31 - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """continuous_usage_stats: the usage so far in every chunk; implies include_usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(msgspec.Struct, forbid_unknown_fields=True):
    """Headway's own field. max_draft_tokens: the most drafts a round for this request, up to the server's
    depth; 0 turns speculation off. report: the answer tells drafted and accepted tokens by position.
    draft_positions: each choice tells which of its tokens were drafts. exact: drafts change no text even
    on a LOSSY server (--relaxed-thinking)."""

    max_draft_tokens: int | None = None
    report: bool | None = None
    draft_positions: bool | None = None
    exact: bool | None = None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of every request for an answer in OpenAI's APIs: sampling, the end of the text, and
    scheduling."""

    model: str | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = None
    speculation: Speculation | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Further fields of completions and chats. The form of the text is defined by at most one of
    structured_outputs, response_format, the guided_* fields and the five fields after them, which come
    from SGLang, llama.cpp, TGI and Ollama."""

    n: int | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: JsonSchema | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: JsonSchema | str | None = None
    ebnf: str | None = None
    grammar: str | ResponseFormat | None = None
    format: str | JsonSchema | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def has_continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def wants_draft_positions(self) -> bool:
        return self.speculation is not None and bool(self.speculation.draft_positions)


Ranges = dict[str, tuple[float, float]]

RANGES: Ranges = {
    "n": (1, MAX_N),
    "seed": (-(2**63), 2**64 - 1),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, MAX_INTEGER),
    "min_p": (0, 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "min_tokens": (0, MAX_INTEGER),
    "truncate_prompt_tokens": (1, MAX_INTEGER),
    "priority": (-MAX_INTEGER, MAX_INTEGER),
}


def check_generation(fields: GenerationFields) -> None:
    """Refuses values out of range, each by name."""
    require(fields.top_p is None or 0 < fields.top_p <= 1, "top_p", fields.top_p, "above 0, at most 1")
    check_ranges(fields, RANGES)
    _check_token_rules(fields)
    _check_stop(fields)
    if fields.cache_salt is not None:
        check_strings("cache_salt", [fields.cache_salt], 1, MAX_CACHE_SALT_CHARACTERS)
    if fields.speculation is not None:
        check_range("speculation.max_draft_tokens", fields.speculation.max_draft_tokens, 0, MAX_INTEGER)
    if fields.includes_usage and not fields.stream:
        raise ApiError(
            "stream_options is only allowed when stream is true", param="stream_options", code="invalid_value"
        )


def check_ranges(fields: GenerationFields, ranges: Ranges) -> None:
    for name, (low, high) in ranges.items():
        check_range(name, getattr(fields, name), low, high)


def _check_token_rules(fields: GenerationFields) -> None:
    bias = fields.logit_bias or {}
    check_count("logit_bias", list(bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    for token_id, value in bias.items():
        is_id = token_id.isascii() and token_id.isdecimal() and len(token_id) < 10
        require(is_id, "logit_bias", repr(token_id[:64]), "keyed by token ids")
        check_range("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    num_ids = len({int(token_id) for token_id in bias})
    require(
        num_ids == len(bias), "logit_bias", f"{len(bias)} entries for {num_ids} token ids", "one for each"
    )
    check_strings("bad_words", fields.bad_words or (), MAX_BAD_WORDS // 2, MAX_BAD_WORD_CHARACTERS)
    require(
        fields.allowed_token_ids != [], "allowed_token_ids", "empty", "a list of 1 id or more, or left out"
    )


def _check_stop(fields: GenerationFields) -> None:
    check_strings("stop", fields.stop_strings, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
    check_count("stop_token_ids", fields.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
