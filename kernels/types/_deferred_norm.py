"""A norm of which only the weight was applied before the product that takes its result."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._triton import blocks_of, power_of_two


class DeferredNorm(NamedTuple):
    """A root-mean-square norm whose weight a product's inputs bear already: what remains is one factor a row."""

    squares: torch.Tensor  # [rows, square_tiles(hidden)] float32: sums over 64 columns of the residual each
    epsilon: float

    def factor(self, hidden: int) -> torch.Tensor:
        """[rows, 1] float32: what the product is multiplied by."""
        mean = self.squares[:, : blocks_of(hidden, 64)].sum(1, keepdim=True) / hidden
        return torch.rsqrt(mean + self.epsilon)


def square_tiles(hidden: int) -> int:
    """From 32 columns on kernels add a row's in the same order, however many rows there are."""
    return max(power_of_two(blocks_of(hidden, 64)), 32)
