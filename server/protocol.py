"""The wire format of the API: bodies in, bodies out, as OpenAI names their fields.

Knows no tokenizer and no engine; what a field's value means for a model is decided in `prompt` and `generation`.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from headway.server.errors import ApiError

MAX_CHOICES = 512  # prompts x n of one request
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024

Prompt = str | list[str | int | list[int]]
Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Speculation(msgspec.Struct, forbid_unknown_fields=True):
    """Headway's own: how many drafts a round this request may get; 0 turns speculation off."""

    max_draft_tokens: int | None = None


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. null means the default, as everywhere in OpenAI's API."""

    prompt: Prompt
    model: str | None = None
    n: int | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: Speculation | None = None
    # Known to OpenAI, not served yet: only values that change nothing are accepted.
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as JSON, whatever its content type. Raises ApiError that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None


def _refusal(message: str) -> ApiError:
    """msgspec's message, with the field as `param` and OpenAI's words for the two common faults."""
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").removeprefix(".")
    quoted = re.search(r"field `([^`]*)`", what)
    if quoted is None:
        field = re.split(r"[.\[]", path)[0] or None
        return ApiError(f"{path or 'the body'}: {_lower(what)}", param=field, code="invalid_type")
    name = f"{path}.{quoted[1]}" if path else quoted[1]
    if "unknown" in what:
        return ApiError(
            f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    return ApiError(f"{name} is missing; it is required", param=name, code="missing_required_parameter")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def check(request: CompletionRequest) -> None:
    """Refuses values out of range and fields that are not served, each by name."""
    _check_range("n", request.n, 1, MAX_N)
    _check_range("max_tokens", request.max_tokens, 1, None)
    _check_range("temperature", request.temperature, 0, 2)
    _check_range("top_p", request.top_p, 0, 1)
    _require(request.top_p != 0, "top_p", 0, "above 0, at most 1")
    _check_range("top_k", request.top_k, -1, None)
    _check_range("min_p", request.min_p, 0, 1)
    _check_range("seed", request.seed, -(2**63), 2**64 - 1)
    if request.speculation is not None:
        _check_range("speculation.max_draft_tokens", request.speculation.max_draft_tokens, 0, None)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options is only allowed when stream is true", param="stream_options")
    _check_stop(stop_strings(request))
    _check_unserved(request)


def stop_strings(request: CompletionRequest) -> tuple[str, ...]:
    stop = request.stop
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    is_met = value is None or (low <= value and (high is None or value <= high))
    _require(is_met, name, value, f"{low} or more" if high is None else f"{low} to {high}")


def _require(is_met: bool, name: str, value: object, limit: str) -> None:
    if not is_met:
        raise ApiError(f"{name} is {value}, it must be {limit}", param=name, code="invalid_value")


def _check_stop(stop: tuple[str, ...]) -> None:
    _require(len(stop) <= MAX_STOP_STRINGS, "stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in stop:
        _require(text != "", "stop", "an empty string", "a string of 1 character or more")
        limit = f"a string of at most {MAX_STOP_CHARACTERS}"
        _require(len(text) <= MAX_STOP_CHARACTERS, "stop", f"a string of {len(text)} characters", limit)


def _check_unserved(request: CompletionRequest) -> None:
    is_neutral = {
        "best_of": request.best_of in (None, request.n or 1),
        "suffix": not request.suffix,
        "logprobs": request.logprobs is None,
        "logit_bias": not request.logit_bias,
        "presence_penalty": not request.presence_penalty,
        "frequency_penalty": not request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty in (None, 1),
    }
    for name, may_pass in is_neutral.items():
        if not may_pass:
            message = f"{name} is not supported by this server yet; leave it out"
            raise ApiError(message, param=name, code="unsupported_parameter")


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class CompletionChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: None
    finish_reason: str | None


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "headway"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
