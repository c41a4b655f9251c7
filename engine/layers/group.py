"""The ranks that compute one model together, each on a device of its own.

Every rank keeps a share of the outputs of each linear layer, and of the heads between them, with all inputs.
What a layer reads is gathered before its product. Nothing is summed over ranks, so that their number changes
no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Group(Protocol):
    """The ranks of one model, as one of them sees them. All ranks call the methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, n], of this rank. Returns [tokens, size * n]: those of all ranks, in their order."""
        ...

    def largest(self, number: int) -> int:
        """Returns the largest of the ranks' numbers, by which they decide alike. It waits for all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A group of one rank, which launches nothing."""

    rank: int = 0
    size: int = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x itself."""
        return x

    def largest(self, number: int) -> int:
        """Returns the number itself."""
        return number


ALONE = Alone()
