"""Token counts of an answer, and the effect of speculation on it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CompletionTokensDetails(msgspec.Struct):
    """accepted_prediction_tokens, rejected_prediction_tokens: the tokens of the request's `prediction`
    that the answer has and has not; without a prediction, the accepted and rejected drafts.
    reasoning_tokens: those between the delimiters of the reasoning; only for models that reason and have
    tokens as delimiters."""

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
    """Counts by position over all choices: entry i is about the drafts at place i + 1 of their windows.

    estimated_speedup: tokens a second over the estimate without drafts, by the measured times of rounds; None
    if none was measured.
    """

    max_draft_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    estimated_speedup: float | None = None


class DraftPositions(msgspec.Struct):
    """Lists of one length, with an entry for each token. text_offset: the index of its text in the choice's
    text.

    draft_positions: the place of an accepted draft in its window, from 1; 0 for a token of the model itself.
    delta_offset: the index of a chunk's delta in the choice's text; only for chats whose text is split into
    parts.
    """

    draft_positions: list[int]
    text_offset: list[int]
    delta_offset: int | UnsetType = UNSET
