"""The weight of one expert, as a linear layer has it."""

from __future__ import annotations

import torch

from headway.kernels.types._experts import GROUP, ExpertMatrix


def expanded_expert(weight: ExpertMatrix, expert: int) -> torch.Tensor:
    """Returns the weight of one expert, [outputs, inputs] in the dtype of activations."""
    values = weight.values[expert]
    if weight.scales is None:
        return values
    codes = values.float()
    if values.dtype == torch.uint8:
        halves = values.view(len(values), -1, GROUP // 2)
        codes = torch.cat([halves & 15, halves >> 4], 2).flatten(1).float()
        zeros = 8.0 if weight.zeros is None else _by_input(weight.zeros[expert])
        codes = codes - zeros
    return (codes * _by_input(weight.scales[expert])).bfloat16()


def _by_input(values: torch.Tensor) -> torch.Tensor:
    """[groups, outputs] -> [outputs, inputs] float32."""
    return values.float().T.repeat_interleave(GROUP, 1)
