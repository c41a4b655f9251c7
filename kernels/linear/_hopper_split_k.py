"""Split-K across programs of one launch: partial sums go through the L2 cache to the program of the last
part.

It serves the TMA kernels of _hopper_core.py. dispatch.py makes the last part longer, so that the other parts
are mostly written when its program loads them. Knows no operation.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import gl, gluon_jit_once_for, tl


@gluon_jit_once_for()
def hand_over(
    sums: gl.tensor,  # [OUTPUTS, ROWS] float32: partial sums
    partial_ptr: gl.tensor,
    arrived_ptr: gl.tensor,
    tile: gl.tensor,
    part: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    """Writes a part's sums for the program of the tile's last part."""
    layout: gl.constexpr = sums.type.layout
    cells = _partial_cells(partial_ptr, tile, layout, ROWS, OUTPUTS, SPLIT)
    gl.store(cells + part * (OUTPUTS * ROWS), sums)
    tl.debug_barrier()
    gl.atomic_add(arrived_ptr + tile, 1, sem="release")


@gluon_jit_once_for()
def sums_handed_over(
    partial_ptr: gl.tensor,
    arrived_ptr: gl.tensor,
    tile: gl.tensor,
    layout: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
) -> gl.tuple:
    """Waits for the other parts of a tile, issues the loads of their sums and returns these, [OUTPUTS, ROWS]
    float32 each.

    The wait always ends: there are no more programs than multiprocessors, other kernels end by themselves,
    and the programs of the other parts wait for nothing and start earlier, because their numbers are lower.
    """
    while _arrived(arrived_ptr + tile) < SPLIT - 1:
        pass
    cells = _partial_cells(partial_ptr, tile, layout, ROWS, OUTPUTS, SPLIT)
    sums: gl.tuple = ()
    for part in gl.static_range(SPLIT - 1):
        sums += (gl.load(cells + part * (OUTPUTS * ROWS), cache_modifier=".cg"),)
    return sums


@gluon_jit_once_for()
def forget_arrivals(arrived_ptr: gl.tensor, tile: gl.tensor) -> None:
    """Resets the number of written parts for the next launch, after all threads have read it. It is called
    after the sums are stored; earlier it would take 0.5 us."""
    tl.debug_barrier()
    gl.store(arrived_ptr + tile, 0)


@gluon_jit_once_for()
def _arrived(arrived_ptr: gl.tensor) -> gl.tensor:
    """Returns the number of partial sums written (acquire load)."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [arrived_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@gluon_jit_once_for()
def _partial_cells(
    partial_ptr: gl.tensor,
    tile: gl.tensor,
    layout: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
) -> gl.tensor:
    """Returns the addresses of the tile's first part, [OUTPUTS, ROWS]. They have the order of the threads, so
    that a warp writes 256 bytes at once: eight rows of eight outputs, of which a thread has two adjacent
    ones."""
    place = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    warp: gl.constexpr = OUTPUTS // gl.num_warps()
    piece = (row // 8 * (warp // 8) + place % warp // 8) * gl.num_warps() + place // warp
    return partial_ptr + tile * (SPLIT * OUTPUTS * ROWS) + (piece * 8 + place % 8) * 8 + row % 8
