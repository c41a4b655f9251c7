"""Products of tokens with the experts that they chose, on a CPU."""

from __future__ import annotations

from typing import Literal

import torch

from headway.kernels.linear._cpu_linear import plain_cpu_linear
from headway.kernels.linear._integer_cpu_linear import integer_cpu_linear, integer_cpu_weight
from headway.kernels.reference._activations import gated_product
from headway.kernels.reference.experts._expanded_expert import expanded_expert
from headway.kernels.types._epilogue import Epilogue, GateActivation
from headway.kernels.types._experts import ExpertMatrix, IntegerCpuExperts


def cpu_experts(
    x: torch.Tensor,  # [tokens or tokens * slots, inputs] float; float32 for IntegerCpuExperts
    weight: ExpertMatrix | IntegerCpuExperts,
    ids: torch.Tensor,  # [tokens, slots] int32
    *,
    gate: GateActivation | None = None,
) -> torch.Tensor:
    """Returns [tokens * slots, outputs], or [tokens * slots, outputs / 2] with a gate; the rows of pairs
    without an expert are undefined. A pair's result depends on no other."""
    outputs = weight.shape[1] if gate is None else weight.shape[1] // 2
    out = x.new_zeros(ids.numel(), outputs)
    chosen, slots = ids.flatten(), ids.numel() // max(len(x), 1)
    for expert in sorted(set(chosen.tolist()) - {-1}):
        pairs = (chosen == expert).nonzero()[:, 0]
        out[pairs] = _product(x[pairs // slots], weight, expert, gate)
    return out


def _product(
    x: torch.Tensor, weight: ExpertMatrix | IntegerCpuExperts, expert: int, gate: GateActivation | None
) -> torch.Tensor:
    if isinstance(weight, IntegerCpuExperts):
        return integer_cpu_linear(x, weight.experts[expert], Epilogue(None, gate))
    product = plain_cpu_linear(x, expanded_expert(weight, expert))
    if gate is None:
        return product
    first, second = product.chunk(2, 1)
    return gated_product(first, second, gate)


def integer_cpu_expert_weights(
    weight: torch.Tensor,  # [experts, out, in] float32
    *,
    bits: Literal[4, 8],
) -> IntegerCpuExperts:
    """Returns the experts' weights, rounded to the nearest codes. Requires `has_integer_products`."""
    return IntegerCpuExperts(tuple(integer_cpu_weight(own, bits=bits) for own in weight))
