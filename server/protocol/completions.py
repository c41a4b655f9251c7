"""POST /v1/completions."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from headway.engine import MAX_LOGPROBS
from headway.server.base.errors import ApiError
from headway.server.protocol import other_names
from headway.server.protocol.checks import require
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.parameters import (
    MAX_INTEGER,
    MAX_N,
    GenerationFields,
    Ranges,
    check_generation,
    check_ranges,
)
from headway.server.protocol.unserved import COMPLETIONS, Table
from headway.server.protocol.usage import DraftPositions, SpeculationReport, Usage

Prompt = str | list[str | int | list[int]]


class CompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """best_of: the number of generated candidates; the n with the highest log-probability a token are
    returned. suffix: the text after a gap that the completion fills; an empty one counts as none."""

    unserved: ClassVar[Table] = COMPLETIONS
    other_names: ClassVar[OtherNames] = other_names.COMPLETIONS

    prompt: Prompt
    suffix: str | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def num_candidates(self) -> int:
        """Returns the number of choices generated for each prompt."""
        return max(self.n or 1, self.best_of or 1)


RANGES: Ranges = {"max_tokens": (0, MAX_INTEGER), "logprobs": (0, MAX_LOGPROBS), "best_of": (1, MAX_N)}


def check(request: CompletionRequest) -> None:
    """Refuses values out of range and unserved fields, each by name."""
    check_generation(request)
    check_ranges(request, RANGES)
    require(request.max_tokens != 0 or bool(request.echo), "max_tokens", 0, "1 or more (0 with echo only)")
    n, best_of = request.n or 1, request.best_of
    require(best_of is None or best_of >= n, "best_of", best_of, f"n = {n} or more")
    if request.suffix and request.echo and request.logprobs is not None:
        message = (
            "echo with logprobs is not served beside suffix: the prompt that the model sees has more than the text that is "
            "echoed; leave one of them out, or write the model's own fill-in-the-middle tokens into the prompt"
        )
        raise ApiError(message, param="suffix", code="unsupported_parameter")
    if request.stream and best_of is not None and best_of > n:
        message = f"best_of is {best_of}, in a stream it must be n = {n}: the best are known at the end only"
        raise ApiError(message, param="best_of", code="invalid_value")


class CompletionLogprobs(msgspec.Struct):
    """Lists of one length, with an entry for each token. text_offset: the index of its text in the choice's
    text.

    The first token of an echoed prompt has no log-probability, since nothing precedes it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A whole choice, or a piece of one in a stream. stop_reason: only with finish_reason; see
    docs/api.md."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    speculation: DraftPositions | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    speculation: SpeculationReport | UnsetType = UNSET
