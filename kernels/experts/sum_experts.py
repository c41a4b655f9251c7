"""The sum of the results of a token's experts."""

from __future__ import annotations

import torch

from headway.kernels.elementwise._weighted_sum import weighted_sum
from headway.kernels.reference.experts.sum_experts import sum_experts as sum_experts_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, takes_triton, tl

_BLOCK = 1024


@jit
def _sum_kernel(
    result_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < hidden
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = weighted_sum(result_ptr, weight_ptr, token, column, is_inside, hidden, SLOTS)
    tl.store(out_ptr + token * hidden + column, total, mask=is_inside)


def sum_experts(
    results: torch.Tensor,  # [tokens * slots, hidden] float
    weights: torch.Tensor,  # [tokens, slots] float32
) -> torch.Tensor:
    """Returns the weighted sums, [tokens, hidden], added slot by slot in float32 and rounded once."""
    if not takes_triton(results):
        return sum_experts_twin(results, weights)
    check_dense(results, weights)
    (tokens, slots), hidden = weights.shape, results.shape[1]
    out = results.new_empty(tokens, hidden)
    if tokens > 0:
        overlaps, launch = overlap(results.device)
        _sum_kernel[(tokens, blocks_of(hidden, _BLOCK))](
            results, weights, out, hidden, SLOTS=slots, BLOCK=_BLOCK, OVERLAPS=overlaps, num_warps=4, **launch
        )
    return out
