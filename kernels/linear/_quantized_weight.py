"""Packs quantised weights in the order of their kernels, and expands them again."""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import has_bulk_copies, is_copied
from headway.kernels.linear._hopper_quantized import GROUP, MOST_ROWS, streamed_expansion
from headway.kernels.reference.linear._quantized_weight import expanded_weight as expanded_weight_twin
from headway.kernels.types._code_tiles import OUTPUTS, pack_codes, paired_outputs
from headway.kernels.types._weights import QuantizedWeight

_LARGEST_SCALE = 128.0  # of float8: times 2 ** 120 it is finite
_NAN = 127  # the code of NaN in float8_e4m3fn, without the sign


def multiplies_codes(x: torch.Tensor) -> bool:
    """Returns whether a product with x reads the codes."""
    return 0 < len(x) <= MOST_ROWS and has_bulk_copies(x) and is_copied(x)


def reads_codes(device: torch.device) -> bool:
    """Returns whether products on that device read codes."""
    return device.type == "cuda" and has_bulk_copies(torch.empty(0, device=device))


def rows_of_each_code_kernel(most_rows: int) -> list[int]:
    """Returns one number of rows, up to most_rows, for each kernel that reads codes and for the next one."""
    return [rows for rows in (8, 16, 32, 64, MOST_ROWS, MOST_ROWS + 1) if rows <= most_rows]


def expanded_weight(weight: QuantizedWeight) -> torch.Tensor:
    """Returns the expanded weight, [outputs, inputs] bfloat16, in the unpaired order of outputs."""
    if not has_bulk_copies(weight.codes):
        return expanded_weight_twin(weight)
    expanded = streamed_expansion(weight._replace(rest=None))
    return expanded if weight.rest is None else torch.cat([expanded, weight.rest])


def quantized_weight(
    codes: torch.Tensor,  # [outputs, inputs] uint8: the bits of float8_e4m3fn, or integers below 16
    scales: torch.Tensor,  # [outputs, groups] bfloat16 or float32, not 0
    zeros: torch.Tensor | None = None,  # [outputs, groups] integers below 16, of codes of 4 bits; None: 8
    *,
    bits: int,
    is_paired: bool = False,
) -> QuantizedWeight | None:
    """Returns the weight in the order of its kernels; None if they do not support it."""
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if outputs % OUTPUTS > 0 or inputs % (2 * GROUP) > 0 or not can_expand(codes, scales, bits):
        return None
    of_group = inputs // groups
    if inputs % groups > 0 or (groups > 1 and of_group % GROUP > 0):
        return None
    order = paired_outputs(outputs, codes.device) if is_paired else None

    def by_group(values: torch.Tensor) -> torch.Tensor:
        """Returns [1 or inputs / GROUP, outputs] from [outputs, groups]."""
        own = values if order is None else values[order]
        return (own if groups == 1 else own.repeat_interleave(of_group // GROUP, 1)).T.contiguous()

    packed = pack_codes((codes if order is None else codes[order]).contiguous(), bits)
    shifts = (
        None if zeros is None or bits == 8 or bool((zeros == 8).all()) else by_group(zeros.to(scales.dtype))
    )
    return QuantizedWeight(packed, by_group(scales), shifts, bits, is_paired)


def can_expand(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> bool:
    """Returns whether the kernels expand the codes correctly: always for integers, for float8 unless a code
    is NaN or a scale exceeds 128."""
    if bits == 4:
        return True
    return bool((scales.abs() <= _LARGEST_SCALE).all()) and not bool(((codes & _NAN) == _NAN).any())
