"""The values of a quantised weight (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._code_tiles import paired_outputs, unpack_codes
from headway.kernels.types._weights import QuantizedWeight


def expanded_weight(weight: QuantizedWeight) -> torch.Tensor:
    """Returns [outputs, inputs] bfloat16: code, less zero point, times scale in float32, rounded once."""
    outputs, inputs = weight.num_coded, weight.shape[1]
    codes = unpack_codes(weight.codes, weight.bits)
    values = codes.view(torch.float8_e4m3fn).float() if weight.bits == 8 else codes.float()
    groups = values.view(outputs, len(weight.scales), -1)
    if weight.bits == 4:
        groups -= 8.0 if weight.zeros is None else weight.zeros.float().T[:, :, None]
    groups *= weight.scales.float().T[:, :, None]
    found = groups.view(outputs, inputs).to(torch.bfloat16)
    if weight.rest is not None:
        return torch.cat([found, weight.rest])
    if not weight.is_paired:
        return found
    own = torch.empty_like(found)
    own[paired_outputs(outputs, found.device)] = found
    return own
