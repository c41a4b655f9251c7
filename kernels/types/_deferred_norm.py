"""An RMSNorm whose 1/rms is applied in the epilogue of the next product; its weight was applied before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._triton import blocks_of, power_of_two


class DeferredNorm(NamedTuple):
    """The rest of an RMSNorm whose weight was applied to a product's inputs: one factor per row."""

    squares: (
        torch.Tensor
    )  # [rows, square_tiles(hidden)] float32: sums of squares over 64 columns of the residual
    epsilon: float

    def factor(self, hidden: int) -> torch.Tensor:
        """Returns the factors of the product, 1 / rms of each row, [rows, 1] float32."""
        mean = self.squares[:, : blocks_of(hidden, 64)].sum(1, keepdim=True) / hidden
        return torch.rsqrt(mean + self.epsilon)


def square_tiles(hidden: int) -> int:
    """Returns the number of columns of `squares`. From 32 columns on kernels sum a row in the same order,
    whatever the number of rows."""
    return max(power_of_two(blocks_of(hidden, 64)), 32)
