"""Parts of a sum that programs of one launch have, handed over through the L2 cache to the one that has the last part.

For the streamed products: see _streamed.py, which cuts the sums so that the other parts have been handed over when the last
program asks for them. Knows no operation.
"""

from __future__ import annotations

from headway.kernels.runtime._triton import gl, gluon_jit_once_for, tl


@gluon_jit_once_for()
def hand_over(
    sums: gl.tensor,  # [OUTPUTS, ROWS] float32: the part's
    partial_ptr: gl.tensor,
    arrived_ptr: gl.tensor,
    tile: gl.tensor,
    part: gl.tensor,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    """To the program that has the tile's last part."""
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
    """Of each part but the last [OUTPUTS, ROWS] float32, asked for. For the last, which waits here until they are there.

    That they come: there are no more programs than multiprocessors, what else has these ends by itself, and those of the
    other parts wait for nobody; besides, programs start in the order of their numbers, and theirs are lower."""
    while _arrived(arrived_ptr + tile) < SPLIT - 1:
        pass
    cells = _partial_cells(partial_ptr, tile, layout, ROWS, OUTPUTS, SPLIT)
    sums: gl.tuple = ()
    for part in gl.static_range(SPLIT - 1):
        sums += (gl.load(cells + part * (OUTPUTS * ROWS), cache_modifier=".cg"),)
    return sums


@gluon_jit_once_for()
def forget_arrivals(arrived_ptr: gl.tensor, tile: gl.tensor) -> None:
    """Once all threads have seen them, for the next launch. Behind the sums: before them it takes 0.5 us."""
    tl.debug_barrier()
    gl.store(arrived_ptr + tile, 0)


@gluon_jit_once_for()
def _arrived(arrived_ptr: gl.tensor) -> gl.tensor:
    """How many have. What they wrote before is seen by whoever loads behind."""
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
    """[OUTPUTS, ROWS]: where the tile's first part stands. What the threads have, one behind the other, so that a warp writes
    256 bytes at once: of eight outputs eight rows, of which a thread has two side by side."""
    place = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    warp: gl.constexpr = OUTPUTS // gl.num_warps()
    piece = (row // 8 * (warp // 8) + place % warp // 8) * gl.num_warps() + place // warp
    return partial_ptr + tile * (SPLIT * OUTPUTS * ROWS) + (piece * 8 + place % 8) * 8 + row % 8
