"""Chooses the attention kernel and its sizes: pure functions of sizes, without tensors.

The thresholds were measured on an H200.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from headway.kernels.runtime._triton import blocks_of, power_of_two

# With more query rows of a KV head (queries times GQA group size) the tensor cores are busy without split-KV.
MAX_SPLIT_KV_ROWS = 128
# The most query rows of a split-KV program.
SPLIT_KV_TILE_ROWS = 32
# With more cached keys than this one program per query tile takes too long.
MAX_WALKED_KEYS = 8192
# A split-KV launch stores partial results for each query: those of 256 queries of a 7B model take 4 MiB for
# each 2,048 positions of a row's block table. With longer tables a launch takes fewer queries of prompts.
_MAX_SPLIT_KV_QUERIES, _LONG_TABLE_KEYS = 256, 32_768
# A single chunk of at most this number of tokens is computed as a window, by split-KV.
_MAX_PADDED_WINDOW = 32
# If the keys of a layer have at least this number of elements, split-KV uses 64-bit offsets.
WIDE_CACHE_SIZE = 2**31
# Query rows of a split-KV program: for few rows, and for more.
_QUERIES = 16, SPLIT_KV_TILE_ROWS
# Keys of a tile: for 16-bit heads of up to 128 dimensions, for wider 16-bit heads, for other dtypes. Tiles
# are large, because a tile's latency counts more than its work.
_TILE, _WIDE_HEAD_TILE, _WIDE_TYPE_TILE = 128, 64, 32
# Tiles of a quad and of a group. They determine the rounding, as the keys of a tile do.
QUAD_TILES, GROUP_TILES = 4, 16
_PROGRAMS_PER_MULTIPROCESSOR = 4
# With heads of 128 a multiprocessor has registers for this number of warps of the first kernel.
_RESIDENT_WARPS = 8
# Few rows with narrow heads take two programs per multiprocessor, all of which run at once: the next kernels
# may begin only when the last program has started. More rows gain from programs that wait for their turn.
_NARROW_HEAD, _NARROW_ROWS, _PROGRAMS_OF_NARROW_HEADS = 64, 4, 2
# Costs in units of a tile's time, measured on an H200: a tile that shares a multiprocessor with others; the
# combination of tiles, and of quads, for each of the first _COUNTED_PLACES queries of a window; and each
# further head that one program combines.
_TILE_TIME, _PLACE_TIME, _QUAD_PLACE_TIME, _FURTHER_HEAD_TIME, _COUNTED_PLACES = 1.0, 0.4, 0.3, 0.5, 4
# The numbers of rows that the kernels are compiled for. 32 is the least, because a warp sums one number per
# thread in one instruction: with 16 a layer of a model 1,024 wide takes 22 us for one row instead of 20.5.
_SCANNED_ROWS = 32, 64, 256, 1024, 4096
# The most programs of the second kernel. Its programs compute several heads, because they mostly have nothing
# to combine.
_COMBINE_PROGRAMS = 512
# Query rows and warps of the Triton kernels of prompts, which hold four accumulators in registers: a program
# has fewer rows if heads are wide or numbers have 32 bits. Two stages need _STAGES_BYTES of shared memory.
_PROMPT_ROWS, _WIDE_PROMPT_ROWS, _PROMPT_WARPS = 64, 16, 8
_STAGES_BYTES = 160_000
# The most heads of a GQA group that a program computes.
_MAX_PACKED = 8


class AttentionKernel(Enum):
    """The attention kernels. All keep one order of sums (_key_tiles.py), accumulate in float32 and round a
    result once."""

    SPLIT_KV = auto()  # programs share a query's keys, and a second kernel combines their partial results
    PREFILL = auto()  # one program processes all keys of its queries
    PREFILL_TMA = auto()  # as PREFILL, with TMA and warp specialisation
    VARLEN = auto()  # as PREFILL, for chunks whose lengths only the device knows
    VARLEN_TMA = auto()  # as VARLEN, with TMA and warp specialisation


class AttentionShape(NamedTuple):
    """Sizes of a QueryBatch and its heads. can_copy: the kernels with TMA support these heads and caches.
    has_ends: the batch has end positions."""

    window: int | None  # queries of every row; None: only the device knows them
    gqa_group_size: int
    most_cached: int | None = None  # see QueryBatch
    can_copy: bool = False
    has_ends: bool = False


def choose(shape: AttentionShape) -> AttentionKernel:
    """Returns the kernel that computes a batch of this shape."""
    if shape.window is None:
        return AttentionKernel.VARLEN_TMA if shape.can_copy else AttentionKernel.VARLEN
    if not is_split_kv(shape.window, shape.gqa_group_size, shape.most_cached):
        is_tma = shape.can_copy and not shape.has_ends
        return AttentionKernel.PREFILL_TMA if is_tma else AttentionKernel.PREFILL
    return AttentionKernel.SPLIT_KV


def is_split_kv(window: int, gqa_group_size: int, most_cached: int | None) -> bool:
    """Returns whether split-KV computes rows of `window` queries."""
    return window <= max_split_kv_window(gqa_group_size) and splits_keys(most_cached)


def splits_keys(most_cached: int | None) -> bool:
    """Returns whether programs share that number of cached keys; None: the number is not known."""
    return most_cached is None or most_cached > MAX_WALKED_KEYS


def max_split_kv_window(gqa_group_size: int) -> int:
    """Returns the most queries of a row that split-KV computes."""
    return MAX_SPLIT_KV_ROWS // gqa_group_size


def max_prompt_rows(window: int, gqa_group_size: int, most_cached: int | None, max_keys: int) -> int | None:
    """Returns the most rows of prompts in one launch; None: any number. max_keys: the positions that a row's
    block table covers."""
    if not is_split_kv(window, gqa_group_size, most_cached):
        return None
    queries = _MAX_SPLIT_KV_QUERIES * _LONG_TABLE_KEYS // max(max_keys, _LONG_TABLE_KEYS)
    return max(queries // window, 1)


class PaddedForm(Enum):
    """The forms of prompt chunks in a captured graph."""

    WINDOW = auto()  # one chunk, as a row that has all tokens of the graph
    CHUNKS = auto()  # chunks whose number and lengths only the device knows


def padded_form(num_chunks: int, num_tokens: int, most_cached: int) -> PaddedForm | None:
    """Returns the form of chunks in a graph for num_tokens; None: no graph, because split-KV saves more."""
    if num_chunks == 1 and num_tokens <= _MAX_PADDED_WINDOW:
        return PaddedForm.WINDOW
    return None if splits_keys(most_cached) else PaddedForm.CHUNKS


class TileConfig(NamedTuple):
    """The tile of a program of the prefill or varlen kernel, and its pipeline."""

    heads: int  # of a GQA group
    queries: int
    keys: int
    num_warps: int
    num_stages: int


def packed_heads(gqa_group_size: int) -> int:
    """Returns the number of heads of a GQA group that a program computes."""
    return min(gqa_group_size & -gqa_group_size, _MAX_PACKED)


def prompt_tile(gqa_group_size: int, head_dim: int, itemsize: int, shared_memory_bytes: int) -> TileConfig:
    """Returns the tile of the prefill and varlen kernels. itemsize: bytes of a number.

    A program of the varlen kernel computes several heads of a GQA group. One of the prefill kernel computes a
    single head: gqa_group_size is 1.
    """
    heads = packed_heads(gqa_group_size)
    rows = _WIDE_PROMPT_ROWS if itemsize > 2 or head_dim > 128 else _PROMPT_ROWS
    num_stages = 2 if shared_memory_bytes >= _STAGES_BYTES else 1
    return TileConfig(heads, rows // heads, split_kv_tile(head_dim, itemsize), _PROMPT_WARPS, num_stages)


class SplitKvCosts(NamedTuple):
    """The costs by which `split_rows` decides whether a program computes a tile, a quad or a group. Times are
    in units of a tile's time."""

    tile_time: float
    sum_time: float  # the combination of tiles
    quad_sum_time: float  # the combination of quads
    quads_at_once: int  # quads of a KV head, or of a part of its queries, that run at a time


class SplitKvConfig(NamedTuple):
    """The sizes of the two split-KV kernels. The sizes of tile, quad and group determine the rounding."""

    queries: int  # query rows of a program: queries times GQA group size
    parts: int  # programs for the query rows of a window
    tile: int  # keys
    quad: int  # keys
    group: int  # keys
    num_warps: int  # of the first kernel
    num_programs: int  # of the first kernel
    scanned_rows: int  # rows that the kernels are compiled for
    heads_per_program: int  # of the second kernel
    most_pieces: int  # partial results of each query of a window, in all rows
    costs: SplitKvCosts


def split_kv_config(
    rows: int,
    window: int,
    heads: tuple[int, int],
    head_dim: int,
    itemsize: int,
    *,
    max_keys: int,
    num_multiprocessors: int,
) -> SplitKvConfig:
    """Returns the sizes for rows of `window` queries. heads: query heads and KV heads. itemsize: bytes of a
    number. max_keys: the positions that a row's block table covers."""
    q_heads, kv_heads = heads
    query_rows = window * (q_heads // kv_heads)
    queries = _QUERIES[query_rows > _QUERIES[0]]
    parts = blocks_of(query_rows, queries)
    num_warps = 8 if queries > _QUERIES[0] or head_dim > 128 else 4
    heads_per_program = combined_heads(rows, window, q_heads)
    costs = split_kv_costs(kv_heads * parts, window, num_multiprocessors, num_warps, heads_per_program)
    tile = split_kv_tile(head_dim, itemsize)
    is_narrow = itemsize <= 2 and head_dim <= _NARROW_HEAD and rows <= _NARROW_ROWS
    programs = _PROGRAMS_OF_NARROW_HEADS if is_narrow else _PROGRAMS_PER_MULTIPROCESSOR
    return SplitKvConfig(
        queries,
        parts,
        tile,
        QUAD_TILES * tile,
        GROUP_TILES * tile,
        num_warps,
        num_multiprocessors * programs,
        next(n for n in _SCANNED_ROWS if n >= rows),
        heads_per_program,
        most_pieces(rows, max_keys, tile, costs),
        costs,
    )


def split_kv_keys(
    max_keys: int, window: int, sliding_window: int | None, head_dim: int, itemsize: int
) -> int:
    """Returns the most keys that split-KV divides into pieces in a row. max_keys: the positions that a row's
    block table covers."""
    if sliding_window is None:
        return max_keys
    # Pieces are counted from the group in which a row's first window begins.
    group = GROUP_TILES * split_kv_tile(head_dim, itemsize)
    return min(max_keys, sliding_window + window + group)


def split_kv_partials(config: SplitKvConfig, window: int, q_heads: int) -> int:
    """Returns the number of partial results of a launch, each head_dim + 2 numbers of float32."""
    return config.most_pieces * window * q_heads


def split_kv_tile(head_dim: int, itemsize: int) -> int:
    """Returns the keys of a tile. They determine the rounding, so that they may depend on the model only."""
    if itemsize > 2:
        return _WIDE_TYPE_TILE
    return _WIDE_HEAD_TILE if head_dim > 128 else _TILE


def combined_heads(rows: int, window: int, q_heads: int) -> int:
    """Returns the number of heads that a program of the second kernel computes."""
    return min(power_of_two(blocks_of(rows * window * q_heads, _COMBINE_PROGRAMS)), q_heads)


def split_kv_costs(
    items: int, window: int, num_multiprocessors: int, num_warps: int, heads_per_program: int
) -> SplitKvCosts:
    """Returns the costs. items: programs for a tile of keys. num_warps: of a program.

    A program with many warps has a multiprocessor to itself, so that nothing hides its start and end, and its
    partial results are larger: 16 rows of 2,044 keys of 28 query and 4 KV heads x 128 take 64 us by the tile,
    45 by two quads.
    """
    places = min(window, _COUNTED_PLACES)
    alone = num_warps * 2 / _RESIDENT_WARPS
    return SplitKvCosts(
        _TILE_TIME * alone * items / num_multiprocessors,
        _PLACE_TIME * places,
        _QUAD_PLACE_TIME * places * alone + _FURTHER_HEAD_TIME * (heads_per_program - 1),
        max(num_multiprocessors * _RESIDENT_WARPS // (num_warps * items), 1),
    )


def most_pieces(rows: int, max_keys: int, tile: int, costs: SplitKvCosts) -> int:
    """Returns the most pieces of all rows: all groups, as many tiles as take less time than a group, or twice
    the number of quads that run at once."""
    groups, quads, tiles = (rows * blocks_of(max_keys, keys * tile) for keys in (GROUP_TILES, QUAD_TILES, 1))
    return max(
        groups, min(quads, 2 * costs.quads_at_once), min(tiles, int(GROUP_TILES / costs.tile_time) + 1)
    )
