"""How attention computes the scores of queries and keys, and which keys a query attends to."""

from __future__ import annotations

from typing import NamedTuple


class ScoreRule(NamedTuple):
    """The scores of a layer: scale * (query . key), or soft_cap * tanh(that / soft_cap) where there is a cap.

    A query attends to the keys at positions first_position .. its own; with a window to the last `window` of
    these positions only, its own included: key position > query position - window.
    """

    scale: float
    soft_cap: float = 0.0  # 0: none
    first_position: int = 0
    window: int = 0  # 0: all
