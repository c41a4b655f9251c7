"""The tiles of `expert_linear`, as measured on an H200. No tile changes the order of sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import blocks_of
from headway.kernels.types._experts import GROUP, ExpertMatrix


class Tile(NamedTuple):
    """The tile of a program, and its pipeline. outputs: with a gate half of them are gates."""

    outputs: int
    inputs: int
    num_warps: int
    stages: int


_FLOAT32 = Tile(64, 32, 4, 3)
# Smaller tiles are used if larger ones would leave fewer than _PROGRAMS_TO_FILL programs per multiprocessor.
_SMALL, _PROGRAMS_TO_FILL = Tile(64, GROUP, 4, 5), 2
_FEW, _FEW_ROWS = Tile(128, GROUP, 4, 3), 32
# The tiles of many rows. Codes are expanded in groups.
_GATED, _PLAIN = Tile(128, 64, 8, 4), Tile(128, 64, 4, 4)
_GATED_CODES, _PLAIN_CODES = Tile(128, GROUP, 8, 3), Tile(128, GROUP, 4, 3)


def tile_of(
    block_rows: int, num_blocks: int, weight: ExpertMatrix, x: torch.Tensor, *, is_gated: bool
) -> Tile:
    """Returns the tile of a program, as measured on an H200."""
    if x.is_cuda and x.dtype == torch.float32:
        return _FLOAT32
    if block_rows > _FEW_ROWS:
        plain, gated = (_PLAIN, _GATED) if weight.bits == 16 else (_PLAIN_CODES, _GATED_CODES)
        return gated if is_gated else plain
    programs = num_blocks * blocks_of(weight.shape[1], _FEW.outputs)
    return _SMALL if programs < _PROGRAMS_TO_FILL * multiprocessors(x.device) else _FEW
