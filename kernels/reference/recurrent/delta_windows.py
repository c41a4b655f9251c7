"""The gated delta rule over the windows of a round, token by token (PyTorch twin).

A row's bits depend neither on the other rows nor on the division of its tokens into windows, because every
token is one step.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.recurrent._delta_rule import gates_of, keys_values_of, queries_of, read, step
from headway.kernels.types._delta_rule import DeltaRule, DeltaState


def delta_windows(
    mixed: torch.Tensor,  # [rows * width, channels]: queries, keys and values after the convolution
    gates: torch.Tensor,  # [rows * width, 2 * V]: inputs of the gates of writing, then of those of decay
    rule: DeltaRule,
    state: DeltaState,
    state_ids: torch.Tensor,  # [rows] int64
    out: torch.Tensor,  # [rows * width, V, D], written
) -> None:
    """Advances each row's state by the accepted tokens of its last window, writes the results of this window,
    and stores its inputs for the next call. `state.states` then holds the state before this window."""
    num_rows, max_width = len(state_ids), state.mixed.shape[1]
    if num_rows == 0:
        return
    counts = state.counts[state_ids].clamp(max=max_width)
    states = state.states[state_ids]
    last_keys, last_values = keys_values_of(state.mixed[state_ids], rule)
    last_writes, last_decays = gates_of(state.gates[state_ids], rule)
    for place in range(int(counts.max())):
        after = step(
            states, last_keys[:, place], last_values[:, place], last_writes[:, place], last_decays[:, place]
        )
        states = torch.where((place < counts)[:, None, None, None], after, states)
    state.states[state_ids] = states

    own, own_gates = mixed.view(num_rows, -1, mixed.shape[1]), gates.view(num_rows, -1, gates.shape[1])
    width = own.shape[1]
    state.mixed[state_ids, :width] = own[..., rule.query_size :]
    state.gates[state_ids, :width] = own_gates
    queries, (keys, values) = queries_of(own, rule), keys_values_of(own[..., rule.query_size :], rule)
    writes, decays = gates_of(own_gates, rule)
    result = out.view(num_rows, -1, *out.shape[1:])
    for place in range(width):
        states = step(states, keys[:, place], values[:, place], writes[:, place], decays[:, place])
        result[:, place] = read(states, queries[:, place])
