"""The producer warp of attention on Hopper: it finds the program's tiles of queries and issues the TMA copies
of their keys and values."""

from __future__ import annotations

from headway.kernels.linear._hopper_tiles import next_turn
from headway.kernels.runtime._triton import gl, gluon_jit_once_for, hopper


@gluon_jit_once_for()
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon_jit_once_for()
def find_tile(
    index: gl.tensor,
    chunks: gl.tuple,  # (first tokens, lengths, start positions, number of chunks, window)
    limit: gl.tensor,
    sliding_window: gl.tensor,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Returns for the index-th tile of queries, counted from the last one: (number of tiles of queries,
    chunk, its first token, its length, its start position, the tile's first query in it, end of the visible
    keys, first tile of keys, end of the tiles of keys, end of those tiles that every query sees whole).
    CHUNKS is 0 for windows of one width; sliding_window is None for full causal attention."""
    first_ptr, length_ptr, start_ptr, num_chunks, window = chunks
    if CHUNKS == 0:
        tiles_of_each = (window + QUERIES - 1) // QUERIES
        num_tiles = num_chunks * tiles_of_each
        tile = num_tiles - 1 - index
        exists = tile >= 0
        chunk = tile // tiles_of_each
        place = (tile - chunk * tiles_of_each) * QUERIES
        first = chunk.to(gl.int64) * window
        length = window
    else:
        # Every warp loads all chunks, so that no warp waits for another.
        layout: gl.constexpr = gl.BlockedLayout([max(CHUNKS // 32, 1)], [32], [gl.num_warps()], [0])
        each = gl.arange(0, CHUNKS, layout=layout)
        lengths = gl.load(length_ptr + each, mask=each < num_chunks, other=0).to(gl.int32)
        tiles = (lengths + QUERIES - 1) // QUERIES
        tiles_through = gl.associative_scan(tiles, 0, _add)
        num_tiles = gl.sum(tiles, 0)
        tile = num_tiles - 1 - index
        exists = tile >= 0
        chunk = gl.sum((tiles_through <= tile).to(gl.int32), 0)
        place = (tile - gl.sum(gl.where(each == chunk, tiles_through - tiles, 0), 0)) * QUERIES
        first = gl.load(first_ptr + chunk, mask=exists, other=0)
        length = gl.load(length_ptr + chunk, mask=exists, other=0).to(gl.int32)
    start = gl.load(start_ptr + chunk, mask=exists, other=0).to(gl.int32)
    end = gl.where(exists, gl.minimum(start + gl.minimum(length, place + QUERIES), limit), 0)
    whole = gl.minimum(start + place + 1, end) // TILE
    end_tile = gl.cdiv(end, TILE)
    first_tile = 0
    if sliding_window is not None:
        # Queries that see no key compute the last tile, too.
        first_tile = gl.maximum(gl.minimum((start + place - sliding_window + 1) // TILE, end_tile - 1), 0)
        whole = first_tile
    return num_tiles, chunk, first, length, start, place, end, first_tile, end_tile, whole


@gluon_jit_once_for()
def _blocks_of(
    entries_ptr: gl.tensor,
    tile: gl.tensor,
    num_tiles: gl.tensor,
    max_blocks: gl.tensor,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Returns the block ids of a tile of keys; beyond the last tile, any valid ids."""
    COPIES: gl.constexpr = TILE // BLOCK_SIZE if BLOCK_SIZE < TILE else 1
    blocks: gl.tuple = ()
    for i in gl.static_range(COPIES):
        entry = tile * TILE // BLOCK_SIZE + i
        block = gl.load(entries_ptr + entry, mask=(tile < num_tiles) & (entry < max_blocks), other=0)
        blocks += (gl.maximum(block, 0).to(gl.int32),)
    return blocks


@gluon_jit_once_for()
def _fetch(
    desc: gl.nvidia.hopper.tma.tensor_descriptor,
    arrival: gl.shared_memory_descriptor,
    cells: gl.shared_memory_descriptor,  # a tile: PIECE columns of all keys, then the next PIECE columns
    blocks: gl.tuple,
    tile: gl.tensor,
    head: gl.tensor,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
) -> None:
    PIECES: gl.constexpr = cells.shape[0] * cells.shape[1] // (TILE * PIECE)
    COPIES: gl.constexpr = TILE // BLOCK_SIZE if BLOCK_SIZE < TILE else 1
    KEYS: gl.constexpr = TILE // COPIES
    places = cells._reinterpret(cells.dtype, [PIECES * COPIES, 1, KEYS, 1, PIECE], desc.layout)
    hopper.mbarrier.expect(arrival, TILE * PIECES * PIECE * 2)
    for i in gl.static_range(COPIES):
        for piece in gl.static_range(PIECES):
            corner = [blocks[i], tile * TILE % BLOCK_SIZE, head, piece * PIECE]
            hopper.tma.async_copy_global_to_shared(desc, corner, arrival, places.index(piece * COPIES + i))


@gluon_jit_once_for()
def copy_tiles(
    k_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    v_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    ring: gl.tuple,
    table_ptr: gl.tensor,
    table_stride: gl.tensor,
    max_blocks: gl.tensor,
    chunks: gl.tuple,
    sliding_window: gl.tensor,
    HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    GQA_GROUP_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PIECE: gl.constexpr,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copies keys and values in one warp, each tile as soon as both warpgroups have released its stage."""
    keys, values, k_full, v_full, k_empty, v_empty = ring
    turn = gl.to_tensor(0), gl.to_tensor(1)
    item = gl.program_id(0)
    num_items = item + 1
    while item < num_items:
        num_indices, chunk, _first, _length, _start, _place, _end, first_tile, num_tiles, _whole = find_tile(
            item // HEADS, chunks, max_blocks * BLOCK_SIZE, sliding_window, CHUNKS, QUERIES, TILE
        )
        num_items = num_indices * HEADS
        head = item % HEADS * PACKED // GQA_GROUP_SIZE
        entries_ptr = table_ptr + chunk.to(gl.int64) * table_stride
        blocks = _blocks_of(entries_ptr, first_tile, num_tiles, max_blocks, BLOCK_SIZE, TILE)
        for tile in range(first_tile, num_tiles):
            later = _blocks_of(entries_ptr, tile + 1, num_tiles, max_blocks, BLOCK_SIZE, TILE)
            stage, parity = turn
            hopper.mbarrier.wait(k_empty.index(stage), parity)
            _fetch(
                k_desc, k_full.index(stage), keys.index(stage), blocks, tile, head, BLOCK_SIZE, TILE, PIECE
            )
            hopper.mbarrier.wait(v_empty.index(stage), parity)
            _fetch(
                v_desc, v_full.index(stage), values.index(stage), blocks, tile, head, BLOCK_SIZE, TILE, PIECE
            )
            blocks = later
            turn = next_turn(turn, STAGES)
        item += gl.num_programs(0)
