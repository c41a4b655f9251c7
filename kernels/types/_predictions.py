"""The predicted outputs that clients send with requests, by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of N rows; a row of length 0 has none. Places in a row's own text count from
    `starts`."""

    token_ids: torch.Tensor  # [R, P] int32: the predicted tokens, by state id
    state_ids: torch.Tensor  # [N] int64, below R
    lengths: torch.Tensor  # [N] int64: tokens predicted, at most P
    starts: torch.Tensor  # [N] int64: the position at which the row's own text begins
    max_ngram: int  # the longest suffix of the row's tokens that is searched
