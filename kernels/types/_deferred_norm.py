"""An RMSNorm whose 1/rms is applied in the epilogue of the next product; its weight was applied before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._triton import blocks_of, power_of_two


class DeferredNorm(NamedTuple):
    """The rest of a root-mean-square norm whose weight was applied to a product's inputs: one factor a
    row."""

    squares: torch.Tensor  # [rows, square_tiles(hidden)] float32: sums over 64 columns of the residual each
    epsilon: float

    def factor(self, hidden: int) -> torch.Tensor:
        """Returns [rows, 1] float32, what the product is multiplied by."""
        mean = self.squares[:, : blocks_of(hidden, 64)].sum(1, keepdim=True) / hidden
        return torch.rsqrt(mean + self.epsilon)


def square_tiles(hidden: int) -> int:
    """Returns the columns of `squares`. From 32 on kernels sum a row's in the same order, whatever the number
    of rows."""
    return max(power_of_two(blocks_of(hidden, 64)), 32)
