"""Restores recurrent states to those after the last accepted token (PyTorch twin)."""

from __future__ import annotations

import torch


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,  # [layers, slots, S+1, *state]: after each token of the window
    current_states: torch.Tensor,  # [layers, slots, *state], in place
    prefill_status: torch.Tensor,  # [N] integer, 1: prefill row, nothing to copy
    state_idx: torch.Tensor,  # [N] integer: slot of each row
    accepted_counts: torch.Tensor,  # [N] integer: drafts accepted
    num_layers: int,
) -> None:
    """Sets current[l, slot] = intermediate[l, slot, accepted] for the decode rows. Slots are distinct."""
    rows = (prefill_status.view(-1) == 0).nonzero()[:, 0]
    slots = state_idx.view(-1)[rows].long()
    places = accepted_counts.view(-1)[rows].long()
    current_states[:num_layers, slots] = intermediate_states[:num_layers, slots, places]
