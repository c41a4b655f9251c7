"""The accumulator tiles of _hopper_core.py: Hopper's own instructions compute wide tiles, those of older
devices compute thin ones. Also the ring of pipeline stages of all kernels with TMA."""

from __future__ import annotations

from headway.kernels.runtime._triton import constexpr_function, gl, gluon_jit_once_for, mma_v2

WARPS = 4  # of a program


@constexpr_function
def layout_of_sums(outputs: int, rows: int, bits: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a tile's sums, [outputs, rows]: that of Hopper's instructions, which have 64
    outputs, or that of older instructions, which have 16. bits: of an operand."""
    if outputs >= 64:
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 256 // bits]
        )
    warps = [outputs // 16, WARPS // (outputs // 16)]
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=warps, instr_shape=[16, 8])


@gluon_jit_once_for()
def thin_product(
    weights: gl.shared_memory_descriptor,  # [OUTPUTS, INPUTS], OUTPUTS < 64
    inputs: gl.shared_memory_descriptor,  # [INPUTS, ROWS]
    sums: gl.tensor,  # [OUTPUTS, ROWS] float32
    INPUTS: gl.constexpr,
) -> gl.tensor:
    """Returns the sums plus the products of one copy. The instructions have fewer outputs than Hopper's own
    and give the same bits."""
    of_weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.type.layout, k_width=2)
    of_inputs: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums.type.layout, k_width=2)
    for first in gl.static_range(0, INPUTS, 64):
        left = weights.slice(first, 64, dim=1).load(of_weights)
        right = inputs.slice(first, 64, dim=0).load(of_inputs)
        sums = mma_v2(left, right, sums)
    return sums


@gluon_jit_once_for()
def next_turn(turn: gl.tuple, STAGES: gl.constexpr) -> gl.tuple:
    """Returns the stage after this one in a ring of STAGES, and the parity of its barrier."""
    stage, parity = turn
    is_round = stage == STAGES - 1
    return gl.where(is_round, 0, stage + 1), gl.where(is_round, parity ^ 1, parity)
