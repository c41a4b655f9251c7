"""Products of tokens with the experts that they chose."""

from __future__ import annotations

import torch

from headway.kernels.reference.experts.expert_linear import expert_linear as expert_linear_twin
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertMatrix


def expert_linear(
    x: torch.Tensor,  # [tokens or tokens * slots, inputs] float
    weight: ExpertMatrix,
    ids: torch.Tensor,  # [tokens, slots] int32
    *,
    gate: GateActivation | None = None,
) -> torch.Tensor:
    """Returns [tokens * slots, outputs, or outputs / 2 with a gate]; zeros for pairs without an expert."""
    return expert_linear_twin(x, weight, ids, gate=gate)
