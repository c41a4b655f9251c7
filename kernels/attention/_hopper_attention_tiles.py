"""The arithmetic of attention on Hopper for a tile of keys: scores, weights, products with values, and the
folding of partial sums (m, l, accumulators).

The order is that of _key_tiles.py: the accumulators of a tile begin at zero and are then folded into the sums
of the preceding keys.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import gl, gluon_jit_once_for, hopper


@gluon_jit_once_for()
def score(
    q: gl.shared_memory_descriptor, keys: gl.shared_memory_descriptor, is_async: gl.constexpr
) -> gl.tensor:
    """Returns the query-key products, [ROWS, TILE] float32."""
    ROWS: gl.constexpr = q.shape[0]
    TILE: gl.constexpr = keys.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout=layout)
    return hopper.warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=is_async)


@gluon_jit_once_for()
def cap(scores: gl.tensor, slope: gl.tensor) -> gl.tensor:
    """Returns the scores with the soft cap that `attend_tile` of _key_tiles.py applies; slope None: no
    cap."""
    if slope is not None:
        scores = 1.0 - 2.0 / (gl.exp2(scores * slope) + 1.0)
    return scores


@gluon_jit_once_for()
def mask(
    scores: gl.tensor,
    first: gl.tensor,
    first_position: gl.tensor,
    end: gl.tensor,
    position: gl.tensor,
    sliding_window: gl.tensor,
    TILE: gl.constexpr,
) -> gl.tensor:
    """Masks keys before first_position, from `end` on, after a query's position, and before its sliding
    window, unless that is None. first: the tile's first key."""
    token = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
    is_visible = gl.expand_dims((token >= first_position) & (token < end), 0) & (
        gl.expand_dims(token, 0) <= gl.expand_dims(position, 1)
    )
    if sliding_window is not None:
        is_visible &= gl.expand_dims(token, 0) > gl.expand_dims(position - sliding_window, 1)
    return gl.where(is_visible, scores, -float("inf"))


@gluon_jit_once_for()
def weigh(scores: gl.tensor, scale: gl.tensor, operand: gl.constexpr, dtype: gl.constexpr) -> gl.tuple:
    """Returns (the weights of a tile's keys in the layout `operand`, m), computed as in split-KV."""
    m_i = gl.max(scores, 1) * scale
    base = gl.where(m_i == -float("inf"), 0.0, m_i)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-base, 1)))
    by_sums: gl.constexpr = gl.SliceLayout(1, operand.parent)
    return gl.convert_layout(weights.to(dtype), operand), gl.convert_layout(m_i, by_sums)


@gluon_jit_once_for()
def start_sum(weights: gl.tensor, ones: gl.shared_memory_descriptor) -> gl.tensor:
    """Starts the sum of a tile's weights on the tensor cores, as a product with ones."""
    ROWS: gl.constexpr = weights.shape[0]
    ONES: gl.constexpr = ones.shape[0]
    by_ones: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ONES, 16]
    )
    nothing = gl.zeros([ROWS, ONES], gl.float32, layout=by_ones)
    return hopper.warpgroup_mma(weights, ones.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon_jit_once_for()
def start_values(
    weights: gl.tensor, values: gl.shared_memory_descriptor, piece: gl.constexpr, PIECES: gl.constexpr
) -> gl.tensor:
    """Starts the product of a tile's weights with a piece of the values' columns, accumulated from zero."""
    ROWS: gl.constexpr = weights.shape[0]
    TILE: gl.constexpr = values.shape[0] // PIECES
    PIECE: gl.constexpr = values.shape[1]
    by_values: gl.constexpr = weights.type.layout.parent
    no_values = gl.zeros([ROWS, PIECE], gl.float32, layout=by_values)
    of_piece = values.slice(piece * TILE, TILE)
    return hopper.warpgroup_mma(weights, of_piece, no_values, use_acc=False, is_async=True)


@gluon_jit_once_for()
def attend_values(
    weights: gl.tensor,
    values: gl.shared_memory_descriptor,
    ones: gl.shared_memory_descriptor,
    PIECES: gl.constexpr,
) -> gl.tuple:
    """Returns (l, PIECES accumulators) of a tile."""
    running: gl.tuple = (start_sum(weights, ones),)
    for piece in gl.static_range(PIECES):
        running += (start_values(weights, values, piece, PIECES),)
    running += (weights,)
    done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=running)
    by_sums: gl.constexpr = gl.SliceLayout(1, weights.type.layout.parent)
    return gl.convert_layout(gl.max(done[0], 1), by_sums), done[1:-1]


@gluon_jit_once_for()
def fold_values(
    sums: gl.tuple, tile: gl.tuple, values: gl.shared_memory_descriptor, ones: gl.shared_memory_descriptor
) -> gl.tuple:
    """Adds a tile, (weights, m), to the sums, one piece of the values' columns after the other, because wide
    heads leave registers for one product only. The product of the last piece is still running at the end.
    Returns ((m, l, accumulators), (the last product, weights), the factors for `fold_last`)."""
    m_i, l_i, accs = sums
    weights, tile_m = tile
    PIECES: gl.constexpr = len(accs)
    tile_l = start_sum(weights, ones)
    highest, old, new = factors_of(m_i, tile_m)
    folded: gl.tuple = ()
    for piece in gl.static_range(PIECES - 1):
        product = start_values(weights, values, piece, PIECES)
        tile_l, product, weights = hopper.warpgroup_mma_wait(0, deps=(tile_l, product, weights))
        folded += (fold_here(accs[piece], product, old, new),)
    product = start_values(weights, values, PIECES - 1, PIECES)
    by_sums: gl.constexpr = gl.SliceLayout(1, weights.type.layout.parent)
    next_l = gl.convert_layout(gl.max(tile_l, 1), by_sums)
    folded += (accs[PIECES - 1],)
    return (highest, gl.fma(l_i, old, next_l * new), folded), (product, weights), (old, new)


@gluon_jit_once_for()
def fold_last(sums: gl.tuple, product: gl.tensor, factors: gl.tuple) -> gl.tuple:
    """Adds the completed product of the last piece to the sums of `fold_values`."""
    m_i, l_i, accs = sums
    old, new = factors
    PIECES: gl.constexpr = len(accs)
    folded: gl.tuple = accs[:-1]
    folded += (fold_here(accs[PIECES - 1], product, old, new),)
    return m_i, l_i, folded


@gluon_jit_once_for()
def factors_of(m_i: gl.tensor, next_m: gl.tensor) -> gl.tuple:
    """Returns (the new m, the factor of the sums so far, the factor of the next sums)."""
    highest = gl.maximum(m_i, next_m)
    base = gl.where(highest == -float("inf"), 0.0, highest)
    return highest, gl.exp2(m_i - base), gl.exp2(next_m - base)


@gluon_jit_once_for()
def fold_here(acc: gl.tensor, next_acc: gl.tensor, old: gl.tensor, new: gl.tensor) -> gl.tensor:
    """Folds one accumulator as `fold` does. Inline assembly keeps the compiler from delaying it, which would
    need more registers than there are."""
    by_new = next_acc * gl.expand_dims(new, 1)
    operands: gl.constexpr = "=f,f,f,f"
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        operands,
        [acc, gl.expand_dims(old, 1), by_new],
        gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon_jit_once_for()
def fold(sums: gl.tuple, next_sums: gl.tuple) -> gl.tuple:
    """Returns (m, l, accumulators) of the keys so far and the next ones, as `fold` of _key_tiles.py does."""
    m_i, l_i, accs = sums
    next_m, next_l, next_accs = next_sums
    highest, old, new = factors_of(m_i, next_m)
    folded: gl.tuple = ()
    for piece in gl.static_range(len(accs)):
        by_new = next_accs[piece] * gl.expand_dims(new, 1)
        folded += (gl.fma(accs[piece], gl.expand_dims(old, 1), by_new),)
    return highest, gl.fma(l_i, old, next_l * new), folded


@gluon_jit_once_for()
def load_group(group: gl.shared_memory_descriptor, PIECES: gl.constexpr, layout: gl.constexpr) -> gl.tuple:
    """Returns the accumulators of a group from shared memory."""
    ROWS: gl.constexpr = group.shape[0] // PIECES
    accs: gl.tuple = ()
    for piece in gl.static_range(PIECES):
        accs += (group.slice(piece * ROWS, ROWS).load(layout),)
    return accs


@gluon_jit_once_for()
def unhoisted(index: gl.tensor) -> gl.tensor:
    """Returns the index such that the compiler cannot hoist the addresses computed from it: hoisted, they
    would occupy registers throughout the loop over tiles."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], gl.int32, is_pure=False, pack=1)


@gluon_jit_once_for()
def _cells(ROWS: gl.constexpr, PIECE: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    """Returns the offsets of a piece's accumulator in global memory."""
    row = unhoisted(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(row, 1) * PIECE + gl.expand_dims(column, 0)


@gluon_jit_once_for()
def fold_into_stored(m_i: gl.tensor, l_i: gl.tensor, stored_ptr: gl.tensor, next_sums: gl.tuple) -> gl.tuple:
    """Folds the next sums into accumulators that `store_sums` stored, a piece at a time to save registers."""
    next_m, next_l, next_accs = next_sums
    highest, old, new = factors_of(m_i, next_m)
    ROWS: gl.constexpr = next_accs[0].shape[0]
    PIECE: gl.constexpr = next_accs[0].shape[1]
    layout: gl.constexpr = next_accs[0].type.layout
    cells = _cells(ROWS, PIECE, layout)
    folded: gl.tuple = ()
    for piece in gl.static_range(len(next_accs)):
        acc = gl.load(stored_ptr + piece * (ROWS * PIECE) + cells)
        folded += (fold_here(acc, next_accs[piece], old, new),)
    return highest, gl.fma(l_i, old, next_l * new), folded


@gluon_jit_once_for()
def store_sums(stored_ptr: gl.tensor, accs: gl.tuple) -> None:
    """Stores accumulators in global memory."""
    ROWS: gl.constexpr = accs[0].shape[0]
    PIECE: gl.constexpr = accs[0].shape[1]
    layout: gl.constexpr = accs[0].type.layout
    cells = _cells(ROWS, PIECE, layout)
    for piece in gl.static_range(len(accs)):
        gl.store(stored_ptr + piece * (ROWS * PIECE) + cells, accs[piece])


@gluon_jit_once_for()
def no_keys(ROWS: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, layout: gl.constexpr) -> gl.tuple:
    """Returns (m, l, accumulators) of no keys."""
    m_i = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    l_i = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, layout))
    accs: gl.tuple = ()
    for _piece in gl.static_range(PIECES):
        accs += (gl.zeros([ROWS, PIECE], gl.float32, layout=layout),)
    return m_i, l_i, accs


@gluon_jit_once_for()
def store_group(group: gl.shared_memory_descriptor, accs: gl.tuple) -> None:
    """Stores the accumulators of a group in shared memory."""
    ROWS: gl.constexpr = group.shape[0] // len(accs)
    for piece in gl.static_range(len(accs)):
        group.slice(piece * ROWS, ROWS).store(accs[piece])
