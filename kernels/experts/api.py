"""The feed-forward of a mixture of experts, of any format of weights."""

from __future__ import annotations

import torch

from headway.kernels.experts._pair_blocks import arrange_pairs
from headway.kernels.experts.expert_linear import expert_linear
from headway.kernels.experts.sum_experts import sum_experts
from headway.kernels.runtime._triton import takes_triton
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertChoice, ExpertWeights


def expert_feed_forward(
    x: torch.Tensor,  # [tokens, hidden] float
    choice: ExpertChoice,
    weights: ExpertWeights,
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """Returns [tokens, hidden]: the weighted sum of down(activation(gate(x)) * up(x)) of each token's
    experts.

    Each expert's products are summed and rounded as those of a linear layer, its results are added as
    `sum_experts` does. So a token's result is the same to the last bit among any other tokens.
    """
    blocks = arrange_pairs(choice.ids, weights.gate_up.shape[0]) if takes_triton(x) else None
    inner = expert_linear(x, weights.gate_up, choice.ids, gate=activation, blocks=blocks)
    return sum_experts(expert_linear(inner, weights.down, choice.ids, blocks=blocks), choice.weights)
