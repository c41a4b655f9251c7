"""The feed-forward of a mixture of experts, of any format of weights."""

from __future__ import annotations

import torch

from headway.kernels.experts.expert_linear import expert_linear
from headway.kernels.experts.sum_experts import sum_experts
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
    inner = expert_linear(x, weights.gate_up, choice.ids, gate=activation)
    return sum_experts(expert_linear(inner, weights.down, choice.ids), choice.weights)
