"""Split-KV, how both of its kernels share out the work.

Whether a program computes a tile of keys, a quad or a group depends on the load; the order of sums
(_key_tiles.py) never does. The grid does not depend on lengths.
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
    """Returns (row, start, end of the keys, pieces; keys of a piece: a tile's, a quad's or a group's; pieces
    that a program takes, where it has registers for them).

    By the group a program takes tile after tile, the longest row's last. By the tile all of them are spread
    over the multiprocessors, and what they leave is added up. 12 rows of 4 tiles, 8 kv heads, 132
    multiprocessors, 4 places: 4 tiles' times by the group; by the tile 12 * 4 * 8 / 132 = 2.9, and 1.6 for
    the sums. These take FURTHER_TILE_TIME more for each tile of the longest row after its first group, for a
    program adds up one query's. By the quad it is done after 4 tiles' times and fewer sums, or after 8, where
    more quads exist than run at once, and no more than twice that number; then by two quads, unless rows with
    an odd number make those too many.
    """
    row = tl.arange(0, ROWS)
    # These are read before the preceding kernel has ended. They are older than the last kernel that waits
    # before it lets others start, but may be in the L2 cache only.
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
