"""Codes of one expert's weight, packed, and expanded to what a linear layer has."""

from __future__ import annotations

import torch

from headway.kernels.types._experts import GROUP, ExpertMatrix

# Scales of float8 are kept that many times larger: then a code's bits, put where bfloat16 has exponent and
# mantissa, are the code's value by that power less.
_FLOAT8_SCALE = 2.0**120
_LARGEST_FLOAT8_SCALE = 128.0
_NAN, _SIGN = 127, 128  # of float8_e4m3fn
_SHIFT = 128.0  # integers are put into the mantissa of 128


def pack_expert(
    codes: torch.Tensor,  # [outputs, inputs] uint8: the bits of float8_e4m3fn, or integers below 16
    scales: torch.Tensor,  # [outputs, 1 or a divisor of inputs / 128] float, not 0
    zeros: torch.Tensor | None = None,  # as scales: integers below 16, of codes of 4 bits; None: 8
    *,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns values and factors of one expert of an ExpertMatrix; None where no kernel reads such codes: of
    scales that bfloat16 does not have, or that are not of whole groups of 128 inputs.

    A unit of 16 bits has the codes of inputs i and i + 64 of 128, or of i, i + 32, i + 64 and i + 96, the
    first in the lowest bits.
    """
    outputs, inputs = codes.shape
    groups = inputs // GROUP
    if inputs % GROUP > 0 or groups % scales.shape[1] > 0:
        return None
    short = scales.to(torch.bfloat16)
    if not torch.equal(short.float(), scales.float()):
        return None
    if bits == 8:
        is_nan = (codes & _NAN) == _NAN
        if bool(is_nan.any()) or bool((short.abs() > _LARGEST_FLOAT8_SCALE).any()):
            return None
        short = short * _FLOAT8_SCALE
    shifts = torch.full_like(short, 8.0) if zeros is None else zeros.to(torch.bfloat16)
    low, high = (part.view(torch.int16).int() for part in (short, -(shifts + _SHIFT)))
    factors = (low & 0xFFFF) | (high << 16)
    factors = factors.repeat_interleave(groups // scales.shape[1], 1).T.contiguous()
    of_unit = 16 // bits
    parts = codes.int().view(outputs, groups, of_unit, GROUP // of_unit)
    units = sum(parts[:, :, place] << (bits * place) for place in range(of_unit))
    assert isinstance(units, torch.Tensor)
    return units.flatten(1).to(torch.int16), factors


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
        return ((codes + _SHIFT + _by_input(factors >> 16)) * scales).bfloat16()
    raw = (codes & _NAN) << 4 | (codes & _SIGN) << 8
    return (raw.to(torch.int16).view(torch.bfloat16).float() * scales).bfloat16()


def _by_input(bits: torch.Tensor) -> torch.Tensor:
    """[groups, outputs] int32, bits of bfloat16 -> [outputs, inputs] float32."""
    return bits.to(torch.int16).view(torch.bfloat16).float().T.repeat_interleave(GROUP, 1)
