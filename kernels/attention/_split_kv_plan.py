"""The division of work in split-KV, which both of its kernels compute.

The load decides whether a program computes a tile of keys, a quad or a group; the order of sums
(_key_tiles.py) does not depend on it. The grid does not depend on lengths.
"""

from __future__ import annotations

from headway.kernels.attention._key_tiles import first_key
from headway.kernels.runtime._triton import jit, tl


@jit
def counted_keys(
    first: tl.tensor, end: tl.tensor, sliding_window: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (the key from which a row's pieces are counted, the number of keys from there to `end`).
    Sliding windows begin in the first group."""
    base, count = 0, end
    if sliding_window is not None:
        base = first // GROUP * GROUP
        count = tl.maximum(end - base, 0)
    return base, count


@jit
def split_rows(
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    num_rows: tl.tensor,
    limit: tl.tensor,
    first_position: tl.tensor,
    sliding_window: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    quads_at_once: tl.tensor,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    FURTHER_TILE_TIME: tl.constexpr = 0.03,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns (row, start, end of the keys, number of pieces, keys per piece, pieces per program).

    A piece is a tile, a quad or a group; a program computes several pieces only if its registers hold them.
    The choice minimises the estimated time, in units of a tile's time:

    - Group: a program computes its tiles one after the other, so that the longest row decides.
    - Tile: all tiles are spread over the multiprocessors, and the second kernel combines the partial results.
      It takes FURTHER_TILE_TIME more for each tile of the longest row after its first group, because one
      program combines a query's results.
    - Quad: it takes 4 tiles' times and fewer partial results, or 8 if there are more quads than run at once,
      up to twice that number. Programs then compute two quads each, unless rows with an odd number of quads
      make too many programs.

    12 rows of 4 tiles with 8 KV heads and windows of 4 take on 132 multiprocessors 4 tiles' times by the
    group, and by the tile 12 * 4 * 8 / 132 = 2.9 and 1.6 for the combination.
    """
    row = tl.arange(0, ROWS)
    # These are read before the preceding kernel has ended (PDL). They were written before the last kernel
    # that waits before it launches its dependents, but may be in the L2 cache only.
    start = tl.load(start_ptr + row, mask=row < num_rows, other=0, cache_modifier=".cg").to(tl.int32)
    end = tl.where(row < num_rows, tl.minimum(start + window, limit), 0)
    if HAS_ENDS:
        given_end = tl.load(end_ptr + row, mask=row < num_rows, other=0, cache_modifier=".cg")
        end = tl.minimum(end, given_end.to(tl.int32))
    first = first_key(first_position, start, sliding_window)
    end = tl.where(end > first, end, 0)
    _, count = counted_keys(first, end, sliding_window, GROUP)
    tiles = (count + TILE - 1) // TILE
    longest = tl.max(tiles, 0)
    quads = (count + QUAD - 1) // QUAD
    num_quads = tl.sum(quads, 0)
    turns = tl.where(num_quads > quads_at_once, 2, 1)
    at_once = tl.where(tl.sum((quads + 1) // 2, 0) > quads_at_once, 1, turns)
    group_time = tl.minimum(longest, GROUP // TILE)
    quad_time = tl.minimum(longest, QUAD // TILE * turns) + quad_sum_time
    quad_time = tl.where(num_quads > 2 * quads_at_once, float("inf"), quad_time)
    tile_time = tl.sum(tiles, 0) * tile_time + sum_time + FURTHER_TILE_TIME * (longest - group_time)
    by_quad = quad_time < group_time
    by_tile = tile_time < tl.minimum(quad_time, group_time)
    pieces = tl.where(by_tile, tiles, tl.where(by_quad, quads, (count + GROUP - 1) // GROUP))
    keys = tl.where(by_tile, TILE, tl.where(by_quad, QUAD, GROUP))
    return row, start, end, pieces, keys, tl.where(keys == QUAD, at_once, 1)
