"""The order of sums that all attention kernels keep, in Triton: the sums of a tile, and the folding of two
sums into one.

A context is cut at fixed positions. Tiles of keys are folded in order within quads of tiles, quads in order
within groups of tiles, and groups in order. Neither the keys that a kernel processes at a time nor the
programs that share a query's keys matter, because folding the sums of no keys changes no bit. So a query's
result is the same in a decode round and in a prompt, in any chunk, among any rows.

A query with a sliding window sees its last keys only. Tiles that no query of a program sees are skipped,
which changes no bit either; quads and groups keep their positions.

The sums are those of FlashAttention (Dao et al., 2022, arXiv:2205.14135). m: the highest score; l: the sum of
2 ** (score - m); acc: the values, weighted by 2 ** (score - m).
"""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl

# If the compiler may fuse multiplications and additions, the rounding depends on the surrounding code.
OPTIONS = {"enable_fp_fusion": False}


@jit
def no_keys(QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of no keys."""
    m_i = tl.full((QUERIES,), -float("inf"), tl.float32)
    l_i = tl.zeros((QUERIES,), tl.float32)
    return m_i, l_i, tl.zeros((QUERIES, HEAD_DIM), tl.float32)


@jit
def first_key(first_position: tl.tensor, position: tl.tensor, sliding_window: tl.tensor) -> tl.tensor:
    """Returns the first key that queries from `position` on see. sliding_window: None for full attention."""
    first = first_position
    if sliding_window is not None:
        first = tl.maximum(position - sliding_window + 1, first_position)
    return first


@jit
def first_border(
    outer: tl.tensor, first: tl.tensor, sliding_window: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the start of the first piece of SIZE keys, from `outer` on, that contains key `first` or a
    later one; `outer` without a sliding window."""
    border = outer
    if sliding_window is not None:
        border = tl.maximum(outer, first // SIZE * SIZE)
    return border


@jit
def attend_tile(
    q: tl.tensor,  # [queries, head_dim]
    k: tl.tensor,  # [keys, head_dim]
    v: tl.tensor,  # [keys, head_dim]
    exists: tl.tensor,  # [keys]
    token: tl.tensor,  # [keys] int32
    position: tl.tensor,  # [queries] int32
    factors: tl.tuple,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of the tile's keys. factors: those of `score_factors`."""
    scale, slope, sliding_window = factors
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if slope is not None:
        scores = 1.0 - 2.0 / (tl.exp2(scores * slope) + 1.0)
    is_visible = exists[None, :] & (token[None, :] <= position[:, None])
    if sliding_window is not None:
        is_visible &= token[None, :] > position[:, None] - sliding_window
    scores = tl.where(is_visible, scores, -float("inf"))
    m_i = tl.max(scores, 1) * scale
    base = tl.where(m_i == -float("inf"), 0.0, m_i)
    below = tl.broadcast_to(-base[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, below)).to(v.dtype)
    # The tensor cores sum in one order, whatever the shape of the tile.
    ones = tl.full((TILE, 16), 1.0, v.dtype)
    l_i = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    return m_i, l_i, tl.dot(weights, v, input_precision="ieee")


@jit
def fold(
    m_i: tl.tensor,  # [n] float32
    l_i: tl.tensor,  # [n] float32
    acc: tl.tensor,  # [n, head_dim] float32
    next_m: tl.tensor,
    next_l: tl.tensor,
    next_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of the keys so far and of the next ones, which are a tile, a quad or a group."""
    highest = tl.maximum(m_i, next_m)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    old = tl.exp2(m_i - base)
    new = tl.exp2(next_m - base)
    l_i = tl.fma(l_i, old, next_l * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return highest, l_i, acc


@jit
def attend_keys(
    q: tl.tensor,  # [queries, head_dim]
    position: tl.tensor,  # [queries] int32
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    factors: tl.tuple,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Returns the attention of each query over its visible keys from first_position to `end`, [queries,
    head_dim] float32, computed by one program."""
    _, _, sliding_window = factors
    total_m, total_l, total = no_keys(QUERIES, HEAD_DIM)
    first = first_key(first_position, tl.min(position, 0), sliding_window)
    for group_first in range(first_border(0, first, sliding_window, GROUP), end, GROUP):
        group_m, group_l, group = no_keys(QUERIES, HEAD_DIM)
        quad_begin = first_border(group_first, first, sliding_window, QUAD)
        for quad_first in range(quad_begin, tl.minimum(group_first + GROUP, end), QUAD):
            m_i, l_i, acc = no_keys(QUERIES, HEAD_DIM)
            tile_begin = first_border(quad_first, first, sliding_window, TILE)
            for tile_first in range(tile_begin, tl.minimum(quad_first + QUAD, end), TILE):
                token = tile_first + tl.arange(0, TILE)
                exists = (token >= first) & (token < end)
                block = tl.load(table_ptr + token // BLOCK_SIZE, mask=exists, other=0)
                cell = tl.maximum(block, 0).to(tl.int64) * block_stride + (token % BLOCK_SIZE) * token_stride
                cells = cell[:, None] + tl.arange(0, HEAD_DIM)[None, :]
                k = tl.load(key_ptr + cells, mask=exists[:, None], other=0)
                v = tl.load(value_ptr + cells, mask=exists[:, None], other=0)
                tile_m, tile_l, tile_acc = attend_tile(q, k, v, exists, token, position, factors, TILE)
                m_i, l_i, acc = fold(m_i, l_i, acc, tile_m, tile_l, tile_acc)
            group_m, group_l, group = fold(group_m, group_l, group, m_i, l_i, acc)
        total_m, total_l, total = fold(total_m, total_l, total, group_m, group_l, group)
    return total / tl.where(total_l == 0.0, 1.0, total_l)[:, None]
