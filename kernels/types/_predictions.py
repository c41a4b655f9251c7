"""What clients expect their answers to be, by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Predictions:
    """N rows; a row of length 0 has no prediction. A token's place in its text is counted from `starts`."""

    token_ids: torch.Tensor  # [R, P] int32: the predicted tokens, by state id
    state_ids: torch.Tensor  # [N] int64, below R
    lengths: torch.Tensor  # [N] int64: tokens predicted, at most P
    starts: torch.Tensor  # [N] int64: the position at which the row's own text begins
    max_ngram: int  # of the row's last tokens, the most that are looked for
