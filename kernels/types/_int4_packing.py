"""The packing of two 4-bit integers in a byte. Knows no operation."""

from __future__ import annotations

import torch

# NIBBLES adjacent bytes hold 2 * NIBBLES integers, the first half of these in the lower four bits.
NIBBLES = 128


def pack_nibbles(
    integers: torch.Tensor,  # [outputs, inputs] from -8 to 7; inputs are a multiple of 256
) -> torch.Tensor:
    """Returns [outputs, inputs // 2] int8. A byte has the integers of two inputs that are NIBBLES apart."""
    halves = integers.to(torch.int8).view(len(integers), -1, 2, NIBBLES)
    return ((halves[:, :, 0] & 15) | (halves[:, :, 1] << 4)).flatten(1)


def unpack_nibbles(
    packed: torch.Tensor,  # [outputs, inputs // 2] int8
) -> torch.Tensor:
    """Returns [outputs, inputs] int8, from -8 to 7."""
    pairs = packed.view(len(packed), -1, NIBBLES)
    return torch.stack(((pairs << 4) >> 4, pairs >> 4), 2).flatten(1)
