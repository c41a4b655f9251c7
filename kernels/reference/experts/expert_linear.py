"""Products of tokens with the experts that they chose (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import gated_product
from headway.kernels.reference.experts._expanded_expert import expanded_expert
from headway.kernels.reference.linear._padded_linear import padded_linear
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._experts import ExpertMatrix, PairBlocks


def expert_linear(
    x: torch.Tensor,  # [tokens or tokens * slots, inputs] float
    weight: ExpertMatrix,
    ids: torch.Tensor,  # [tokens, slots] int32
    *,
    gate: GateActivation | None = None,
    blocks: PairBlocks | None = None,  # not used
) -> torch.Tensor:
    """Returns [tokens * slots, outputs], or [tokens * slots, outputs / 2] with a gate; the rows of pairs
    without an expert are undefined."""
    outputs = weight.shape[1] if gate is None else weight.shape[1] // 2
    out = x.new_zeros(ids.numel(), outputs)
    chosen, slots = ids.flatten(), ids.numel() // max(len(x), 1)
    for expert in sorted(set(chosen.tolist()) - {-1}):
        pairs = (chosen == expert).nonzero()[:, 0]
        product = padded_linear(x[pairs // slots], expanded_expert(weight, expert), None)
        out[pairs] = product if gate is None else _gated(product, gate)
    return out


def _gated(product: torch.Tensor, gate: GateActivation) -> torch.Tensor:
    first, second = product.chunk(2, 1)
    return gated_product(first, second, gate)
