"""The feed-forward of a mixture of experts (MoE), with weights of any format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.kernels.experts._cpu_experts import cpu_experts
from headway.kernels.experts._expert_tiles import tile_of
from headway.kernels.experts._pair_blocks import arrange_pairs, sizes_of_blocks
from headway.kernels.experts.expert_linear import expert_linear
from headway.kernels.runtime._triton import takes_triton
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertChoice, ExpertMatrix, ExpertWeights, IntegerCpuExperts


def expert_results(
    x: torch.Tensor,  # [tokens, hidden] float
    choice: ExpertChoice,
    weights: ExpertWeights,
    activation: GateActivation = "silu",
    *,
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda inner: inner,
) -> torch.Tensor:
    """Returns down(activation(gate(x)) * up(x)) for each token and each of its experts, [tokens * slots,
    outputs of down] in x's dtype; the rows of pairs without an expert are undefined.

    gather: maps [tokens * slots, outputs of up] to the inputs of down, for weights that have a rank's share
    of the outputs. Products are summed and rounded as those of a batch-invariant linear layer, so that a
    token's results are the same to the last bit among any other tokens. `sum_experts` and `add_rms_norm` add
    them.
    """
    is_cpu = not takes_triton(x)
    blocks = None if is_cpu else arrange_pairs(choice.ids, weights.gate_up.shape[0])

    def product(
        x: torch.Tensor, weight: ExpertMatrix | IntegerCpuExperts, gate: GateActivation | None
    ) -> torch.Tensor:
        if isinstance(weight, IntegerCpuExperts) or is_cpu:
            return cpu_experts(x, weight, choice.ids, gate=gate)
        return expert_linear(x, weight, choice.ids, gate=gate, blocks=blocks)

    return product(gather(product(x, weights.gate_up, activation)), weights.down, None)


def tokens_of_each_kernel(
    x: torch.Tensor,  # [1, hidden]: of the dtype and device of tokens
    weights: ExpertWeights,
    num_slots: int,
    most_tokens: int,
) -> list[int]:
    """Returns numbers of tokens, up to most_tokens, that together use every kernel and tile, so that a
    warm-up compiles all of them; none on a CPU."""
    if not takes_triton(x):
        return []
    fewest: dict[object, int] = {}
    for tokens in range(1, most_tokens + 1):
        rows, num_blocks, chunk = sizes_of_blocks(tokens, num_slots, weights.gate_up.shape[0])
        tiles = (
            tile_of(rows, num_blocks, weight, x, is_gated=weight is weights.gate_up)
            for weight in weights
            if isinstance(weight, ExpertMatrix)
        )
        fewest.setdefault((rows, chunk, *tiles), tokens)
    return list(fewest.values())
