"""The weight of one expert, expanded to the weight of a linear layer."""

from __future__ import annotations

import torch

from headway.kernels.types._experts import CODE_SHIFT, GROUP, ExpertMatrix

_MAGNITUDE, _SIGN = 127, 128  # the bits of float8_e4m3fn


def expanded_expert(weight: ExpertMatrix, expert: int) -> torch.Tensor:
    """Returns the weight of one expert, [outputs, inputs] in the dtype of activations."""
    units = weight.values[expert]
    if weight.factors is None:
        return units
    of_unit, mask = 16 // weight.bits, (1 << weight.bits) - 1
    by_group = units.int().view(len(units), -1, 1, GROUP // of_unit)
    shifts = torch.arange(of_unit, device=units.device, dtype=torch.int32)[:, None] * weight.bits
    codes = ((by_group >> shifts) & mask).flatten(1)
    factors = weight.factors[expert]
    scales = _by_input(factors & 0xFFFF)
    if weight.bits == 4:
        return ((codes + CODE_SHIFT + _by_input(factors >> 16)) * scales).bfloat16()
    raw = (codes & _MAGNITUDE) << 4 | (codes & _SIGN) << 8
    return (raw.to(torch.int16).view(torch.bfloat16).float() * scales).bfloat16()


def _by_input(bits: torch.Tensor) -> torch.Tensor:
    """Returns the values of bfloat16 bits, [groups, outputs] int32, for each input, [outputs, inputs]
    float32."""
    return bits.to(torch.int16).view(torch.bfloat16).float().T.repeat_interleave(GROUP, 1)
