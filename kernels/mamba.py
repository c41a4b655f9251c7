"""Puts recurrent states back to where the last accepted token left them."""

from __future__ import annotations

import torch

from headway.kernels.reference.mamba import mamba_state_selective_copy as mamba_state_selective_copy_twin


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,  # [layers, slots, S+1, *state]: after each token of the window
    current_states: torch.Tensor,  # [layers, slots, *state], in place
    prefill_status: torch.Tensor,  # [N] integer, 1: prefill row, nothing to copy
    state_idx: torch.Tensor,  # [N] integer: slot of each row
    accepted_counts: torch.Tensor,  # [N] integer: drafts accepted
    num_layers: int,
) -> None:
    """current[l, slot] = intermediate[l, slot, accepted] for the decode rows; slots are distinct."""
    mamba_state_selective_copy_twin(
        intermediate_states, current_states, prefill_status, state_idx, accepted_counts, num_layers
    )
