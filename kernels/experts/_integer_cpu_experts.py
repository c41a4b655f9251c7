"""Products of tokens with the experts that they chose, by weights of 4 or 8 bits on an x86 CPU."""

from __future__ import annotations

from typing import Literal

import torch

from headway.kernels.linear._integer_cpu_linear import integer_cpu_linear, integer_cpu_weight
from headway.kernels.types._epilogue import Epilogue, GateActivation
from headway.kernels.types._experts import IntegerCpuExperts


def integer_cpu_experts(
    x: torch.Tensor,  # [tokens or tokens * slots, inputs] float32
    weight: IntegerCpuExperts,
    ids: torch.Tensor,  # [tokens, slots] int32
    *,
    gate: GateActivation | None = None,
) -> torch.Tensor:
    """Returns [tokens * slots, outputs, or outputs / 2 with a gate]; anything for pairs without an expert. A
    pair's result depends on no other, as in `integer_cpu_linear`."""
    outputs = weight.shape[1] if gate is None else weight.shape[1] // 2
    out = x.new_zeros(ids.numel(), outputs)
    chosen, slots, epilogue = ids.flatten(), ids.numel() // max(len(x), 1), Epilogue(None, gate)
    for expert in sorted(set(chosen.tolist()) - {-1}):
        pairs = (chosen == expert).nonzero()[:, 0]
        out[pairs] = integer_cpu_linear(x[pairs // slots], weight.experts[expert], epilogue)
    return out


def integer_cpu_expert_weights(
    weight: torch.Tensor,  # [experts, out, in] float32
    *,
    bits: Literal[4, 8],
) -> IntegerCpuExperts:
    return IntegerCpuExperts(tuple(integer_cpu_weight(own, bits=bits) for own in weight))
