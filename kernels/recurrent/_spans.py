"""Tells how many spans the programs search that look for the span of their tokens."""

from __future__ import annotations

import torch

from headway.kernels.runtime._triton import power_of_two
from headway.kernels.types._delta_rule import TokenSpans

_LEAST = 64  # as many as graphs have, whose spans may be empty


def searched_spans(
    state_ids: torch.Tensor,  # [rows of the table]
    spans: TokenSpans,
) -> int:
    """Returns a power of two that holds all spans, the same for any number of them up to one for each row, so
    that no number of prompts compiles a kernel."""
    return power_of_two(max(len(state_ids), len(spans.rows), _LEAST))
