"""Chooses the tiles of `batch_invariant_linear`, a pure function of sizes, without tensors."""

from __future__ import annotations

from typing import NamedTuple

from headway.kernels.runtime._triton import blocks_of, power_of_two

# Up to this number of rows are one tile, whose program is bound by memory.
_FEW_ROWS = 64


class Tile(NamedTuple):
    """The tile of a program, and its pipeline. share: roughly the share of the tensor cores' peak rate that
    is reached once programs fill the device."""

    outputs: int
    rows: int
    inputs: int
    num_warps: int
    stages: int
    share: float = 1.0


# Outputs are multiples of 64, because Hopper multiplies fewer by another instruction.
_MANY_ROWS = (
    Tile(128, 256, 64, 8, 4, 1.0),
    Tile(128, 128, 64, 8, 4, 0.85),
    Tile(64, 128, 64, 4, 4, 0.6),
    Tile(64, 64, 64, 4, 4, 0.4),
)
_LEAST_OF_MANY = min(tile.rows for tile in _MANY_ROWS)
# Tensor cores do not multiply float32, so that the operands are in registers.
FLOAT32_TILE = Tile(64, 32, 32, 4, 3)


def rows_of_each_tile(
    most_rows: int, num_inputs: int, num_outputs: int, num_multiprocessors: int
) -> list[int]:
    """Returns the smallest number of rows, from 1 to most_rows, that uses each tile."""
    starts = [1, 17, 33, *range(_FEW_ROWS + 1, most_rows + 1, _LEAST_OF_MANY)]
    fewest: dict[Tile, int] = {}
    for rows in starts:
        if rows <= most_rows:
            fewest.setdefault(tile_of(rows, num_inputs, num_outputs, num_multiprocessors), rows)
    return list(fewest.values())


def tile_of(num_rows: int, num_inputs: int, num_outputs: int, num_multiprocessors: int) -> Tile:
    """Returns the tile with the shortest estimated time: the number of waves times the time of a program."""
    if num_rows <= _FEW_ROWS:
        rows = max(power_of_two(num_rows), 16)
        outputs = 128 if blocks_of(num_outputs, 64) > 2 * num_multiprocessors else 64
        # Five stages of 128 inputs must fit in Hopper's shared memory.
        inputs = 128 if num_inputs % 128 == 0 and outputs + rows < 192 else 64
        return Tile(outputs, rows, inputs, 4, 5)

    def duration(tile: Tile) -> float:
        programs = blocks_of(num_outputs, tile.outputs) * blocks_of(num_rows, tile.rows)
        return blocks_of(programs, num_multiprocessors) * tile.outputs * tile.rows / tile.share

    return min(_MANY_ROWS, key=duration)
