"""The scores of attention, and the keys that a query attends to."""

from __future__ import annotations

from typing import NamedTuple


class ScoreRule(NamedTuple):
    """The scores of a layer: scale * (query . key), or soft_cap * tanh(that / soft_cap) if there is a soft
    cap.

    A query attends to the keys from first_position to its own position. With a sliding window it attends to
    the last `window` of these only: key position > query position - window.
    """

    scale: float
    soft_cap: float = 0.0  # 0: no soft cap
    first_position: int = 0
    window: int = 0  # 0: no sliding window
