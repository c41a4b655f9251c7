"""The gated activation of a feed-forward block."""

from __future__ import annotations

import torch

from headway.kernels.elementwise._gated_product import gated_product
from headway.kernels.reference.elementwise.gated_mul import gated_mul as gated_mul_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, takes_triton, tl
from headway.kernels.types._epilogue import GateActivation

# (columns, warps) of a program. Larger programs are faster once they fill the device: with 11,008 columns an
# H200 takes 3.2 us instead of 3.9 for 256 tokens and 5.8 instead of 7.3 for 512, but 2.3 instead of 2.1 for
# 128.
_FEW_TOKENS, _SMALL, _LARGE = 256, (1024, 4), (2048, 8)


@jit
def _gated_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    intermediate: tl.tensor,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < intermediate
    gate_ptr = gate_up_ptr + token * 2 * intermediate + column
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_ptr, mask=is_inside, other=0.0)
    up = tl.load(gate_ptr + intermediate, mask=is_inside, other=0.0)
    tl.store(out_ptr + token * intermediate + column, gated_product(gate, up, ACTIVATION), mask=is_inside)


def gated_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * intermediate]: gate, then up
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """Returns activation(gate) * up, [tokens, intermediate]."""
    if not takes_triton(gate_up):
        return gated_mul_twin(gate_up, activation)
    check_dense(gate_up)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    if tokens > 0:
        block, num_warps = _SMALL if tokens < _FEW_TOKENS else _LARGE
        overlaps, launch = overlap(gate_up.device)
        _gated_mul_kernel[(tokens, blocks_of(intermediate, block))](
            gate_up, out, intermediate,
            BLOCK=block, ACTIVATION=activation, OVERLAPS=overlaps, num_warps=num_warps, **launch,
        )  # fmt: skip
    return out
