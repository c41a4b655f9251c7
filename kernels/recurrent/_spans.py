"""The number of spans that a program searches for the span of its tokens."""

from __future__ import annotations

import torch

from headway.kernels.runtime._triton import power_of_two
from headway.kernels.types._delta_rule import TokenSpans

_LEAST = 64  # the spans of a captured graph, which may be empty


def searched_spans(
    state_ids: torch.Tensor,  # [rows of the table]
    spans: TokenSpans,
) -> int:
    """Returns a power of two that is not below the number of spans. It is the same for any number of spans up
    to one per row, so that no number of prompts compiles another kernel."""
    return power_of_two(max(len(state_ids), len(spans.rows), _LEAST))
