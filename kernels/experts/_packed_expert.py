"""Packs the codes of one expert's weight in the layout that `expert_linear` reads."""

from __future__ import annotations

import torch

from headway.kernels.linear._quantized_weight import can_expand
from headway.kernels.types._experts import CODE_SHIFT, FLOAT8_SCALE, GROUP


def pack_expert(
    codes: torch.Tensor,  # [outputs, inputs] uint8: the bits of float8_e4m3fn, or integers below 16
    scales: torch.Tensor,  # [outputs, 1 or a divisor of inputs / 128] float, not 0
    zeros: torch.Tensor | None = None,  # as scales: integers below 16, of codes of 4 bits; None: 8
    *,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (values, factors) of one expert of an ExpertMatrix. Returns None if no kernel reads such codes:
    bfloat16 does not represent the scales, or a scale does not cover whole groups of 128 inputs.

    A unit of 16 bits has the codes of inputs i and i + 64 of 128 (8 bits), or of i, i + 32, i + 64 and i + 96
    (4 bits), the first in the lowest bits.
    """
    outputs, inputs = codes.shape
    groups = inputs // GROUP
    if inputs % GROUP > 0 or groups % scales.shape[1] > 0:
        return None
    short = scales.to(torch.bfloat16)
    if not torch.equal(short.float(), scales.float()) or not can_expand(codes, scales, bits):
        return None
    if bits == 8:
        short = short * FLOAT8_SCALE
    shifts = torch.full_like(short, 8.0) if zeros is None else zeros.to(torch.bfloat16)
    low, high = (part.view(torch.int16).int() for part in (short, -(shifts + CODE_SHIFT)))
    factors = (low & 0xFFFF) | (high << 16)
    factors = factors.repeat_interleave(groups // scales.shape[1], 1).T.contiguous()
    of_unit = 16 // bits
    parts = codes.int().view(outputs, groups, of_unit, GROUP // of_unit)
    units = sum(parts[:, :, place] << (bits * place) for place in range(of_unit))
    assert isinstance(units, torch.Tensor)
    return units.flatten(1).to(torch.int16), factors
