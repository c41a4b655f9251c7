"""What the experts of a feed-forward compute, with weights of any format."""

from __future__ import annotations

import torch

from headway.kernels.experts._pair_blocks import arrange_pairs
from headway.kernels.experts.expert_linear import expert_linear
from headway.kernels.runtime._triton import takes_triton
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertChoice, ExpertWeights


def expert_results(
    x: torch.Tensor,  # [tokens, hidden] float
    choice: ExpertChoice,
    weights: ExpertWeights,
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """Returns [tokens * slots, hidden]: down(activation(gate(x)) * up(x)) of each token and each of its
    experts; anything for pairs without an expert.

    Each expert's products are summed and rounded as those of a linear layer, so that a token's results are
    the same to the last bit among any other tokens. `sum_experts` and `add_rms_norm` add them.
    """
    blocks = arrange_pairs(choice.ids, weights.gate_up.shape[0]) if takes_triton(x) else None
    inner = expert_linear(x, weights.gate_up, choice.ids, gate=activation, blocks=blocks)
    return expert_linear(inner, weights.down, choice.ids, blocks=blocks)
