"""The gated delta rule over chunks: the chunked form for prompts, token by token for generated tokens
(PyTorch twin).

The chunked form (arXiv:2412.06464, section 3.3) turns the recurrence over 64 tokens into matrix products. Its
pieces begin at the span's first token. A piece that is not full is padded with tokens that change nothing, so
that all pieces have one shape and a token's bits depend neither on later tokens nor on the span's length.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from headway.kernels.reference.recurrent._delta_rule import gates_of, keys_values_of, queries_of, read, step
from headway.kernels.types._delta_rule import DeltaRule, TokenSpans


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
    numbers = zip(*(column.tolist() for column in spans), strict=True)
    for row, first, length, is_generated in numbers:
        if length > 0:
            state_id = state_ids[row]
            size = 1 if is_generated else piece_size
            run = _step if is_generated else _piece
            for start in range(first, first + length, size):
                tokens = slice(start, min(start + size, first + length))
                out[tokens], states[state_id] = run(
                    mixed[tokens], gates[tokens], rule, states[state_id], size
                )


def _step(
    mixed: torch.Tensor,  # [1, channels]
    gates: torch.Tensor,  # [1, 2 * V]
    rule: DeltaRule,
    state: torch.Tensor,  # [V, K, D]
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result, [1, V, D], and the state after it."""
    keys, values = keys_values_of(mixed[:, rule.query_size :], rule)
    writes, decays = gates_of(gates, rule)
    after = step(state[None], keys, values, writes, decays)
    return read(after, queries_of(mixed, rule)), after[0]


def _piece(
    mixed: torch.Tensor,  # [tokens, channels], up to `size` of them
    gates: torch.Tensor,  # [tokens, 2 * V]
    rule: DeltaRule,
    state: torch.Tensor,  # [V, K, D]
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results, [tokens, V, D], and the state after them."""
    count = len(mixed)
    missing = size - count
    keys, values = keys_values_of(mixed[:, rule.query_size :], rule)
    queries, (writes, decays) = queries_of(mixed, rule), gates_of(gates, rule)
    queries, keys, values = (
        pad(x, (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous() for x in (queries, keys, values)
    )
    writes, decays = (pad(x, (0, 0, 0, missing)).T.contiguous() for x in (writes, decays))

    # total[i] is the logarithm of the decay from the start of the piece to token i, between[i, j] the decay
    # from token j to token i.
    total = decays.cumsum(1)
    is_later = torch.ones(size, size, dtype=torch.bool, device=mixed.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill(is_later, -torch.inf).exp()
    from_start = total.exp()[..., None]
    written = keys * writes[..., None]
    # Token i writes the difference between its value and what the state predicts then: a triangular system
    # over the tokens before it.
    system = (written @ keys.transpose(1, 2)) * between
    changes = torch.linalg.solve_triangular(
        system, values * writes[..., None], upper=False, unitriangular=True
    )
    reading = torch.linalg.solve_triangular(system, written * from_start, upper=False, unitriangular=True)
    changes = changes - reading @ state
    result = (queries * from_start) @ state + ((queries @ keys.transpose(1, 2)) * between) @ changes
    to_end = (total[:, -1:] - total).exp()[..., None]
    after = state * from_start[:, -1:] + (keys * to_end).transpose(1, 2) @ changes
    return result.transpose(0, 1)[:count], after
