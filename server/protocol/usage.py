"""Token counts of an answer, and what speculation did for it."""

from __future__ import annotations

import msgspec


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class SpeculationReport(msgspec.Struct):
    """By position: entry i is about the drafts at place i + 1 of their windows; all choices together."""

    max_draft_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
