"""The gated delta rule over chunks: the chunked form for prompts, token by token for generated tokens."""

from __future__ import annotations

import torch

from headway.kernels.recurrent._delta_pieces import run_pieces
from headway.kernels.recurrent._delta_steps import run_steps
from headway.kernels.reference.recurrent.delta_chunks import delta_chunks as delta_chunks_twin
from headway.kernels.runtime._triton import takes_triton
from headway.kernels.types._delta_rule import DeltaRule, DeltaState, TokenSpans


def delta_chunks(
    mixed: torch.Tensor,  # [tokens, channels]: queries, keys and values after the convolution
    gates: torch.Tensor,  # [tokens, 2 * V]: inputs of the gates of writing, then of those of decay
    rule: DeltaRule,
    states: torch.Tensor,  # [entries, V, K, D] float32 or float64, in place
    state_ids: torch.Tensor,  # [rows of the table] int64
    spans: TokenSpans,
    out: torch.Tensor,  # [tokens, V, D], written where a span is
    *,
    piece_size: int,
) -> None:
    """Advances the states of the spans' rows, and writes the results of their tokens."""
    if not takes_triton(mixed):
        delta_chunks_twin(mixed, gates, rule, states, state_ids, spans, out, piece_size=piece_size)
        return
    if len(mixed) == 0 or len(spans.rows) == 0:
        return
    run_pieces(mixed, gates, rule, states, state_ids, spans, out, piece_size)
    nothing = state_ids.new_empty(0)
    no_window = DeltaState(states, nothing, mixed.new_empty((0, 0, 0)), gates.new_empty((0, 0, 0)))
    run_steps(mixed, gates, rule, no_window, state_ids, out, spans)
