"""The gated delta rule over the windows of a round, token by token."""

from __future__ import annotations

import torch

from headway.kernels.reference.recurrent.delta_windows import delta_windows as delta_windows_twin
from headway.kernels.types._delta_rule import DeltaRule, DeltaState


def delta_windows(
    mixed: torch.Tensor,  # [rows * width, channels]: queries, keys and values after the convolution
    gates: torch.Tensor,  # [rows * width, 2 * V]: inputs of the gates of writing, then of those of decay
    rule: DeltaRule,
    state: DeltaState,
    state_ids: torch.Tensor,  # [rows] int64
    out: torch.Tensor,  # [rows * width, V, D], written
) -> None:
    """Brings each row's state forward by the tokens of its last window that have stayed, and keeps this window, whose results it
    writes. The state before the window is what `state.states` holds then."""
    delta_windows_twin(mixed, gates, rule, state, state_ids, out)
