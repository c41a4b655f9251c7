"""Token counts of an answer, and what speculation did for it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CompletionTokensDetails(msgspec.Struct):
    """accepted_prediction_tokens, rejected_prediction_tokens: of the request's `prediction`, those that the
    answer has and has not; of a request without one, accepted and rejected drafts. reasoning_tokens: those
    between the delimiters of the reasoning; only of models that reason, and have tokens for the
    delimiters."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails
    prompt_tokens_details: PromptTokensDetails


class SpeculationReport(msgspec.Struct):
    """By position: entry i is about the drafts at place i + 1 of their windows; all choices together.

    estimated_speedup: tokens a second over those that rounds without drafts would have given, by the times of
    rounds that the engine has measured; None where it has measured none.
    """

    max_draft_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    estimated_speedup: float | None = None


class DraftPositions(msgspec.Struct):
    """Lists of one length, an entry a token. text_offset: where its text begins in the choice's text.

    draft_positions: the place in its window of a draft that was accepted, from 1; 0 for a token that came
    from the model itself. delta_offset: where the text of a chunk's delta begins in the choice's text; only
    of chats whose text is split into parts.
    """

    draft_positions: list[int]
    text_offset: list[int]
    delta_offset: int | UnsetType = UNSET
