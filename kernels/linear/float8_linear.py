"""A linear layer of float8_e4m3fn inputs and weights with per-tensor scales: on Hopper _hopper_linear.py
computes few rows, the library all others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear._hopper_linear import streamed_linear
from headway.kernels.linear.dispatch import FusedOperation
from headway.kernels.reference.linear.float8_linear import float8_linear as float8_linear_twin


def float8_linear(
    x: torch.Tensor,  # [rows, inputs] float8_e4m3fn
    weight: torch.Tensor,  # [outputs, inputs] float8_e4m3fn
    step: torch.Tensor,  # [1] float32: x times step are the inputs
    scale: torch.Tensor,  # [1] float32: weight times scale is the weight
    bias: torch.Tensor | None = None,  # [outputs] of that dtype
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns (x * step) @ (weight * scale).T + bias, [rows, outputs] of that dtype.

    CUDA devices must have compute capability 8.9 or later, and inputs and outputs must be multiples of 16. No
    launch that is still running may write the weight.
    """
    if not x.is_cuda:
        return float8_linear_twin(x, weight, step, scale, bias, dtype=dtype)
    assert all(size % 16 == 0 for size in weight.shape), f"{tuple(weight.shape)} are no multiples of 16"
    if len(x) == 0:
        return x.new_empty(0, len(weight), dtype=dtype)
    streams = choice_of(x, weight, FusedOperation.ADD).config
    if streams is not None:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
        streamed_linear(x, weight, streams, out, step=step, scale=scale, bias=bias)
        return out
    whole = ScalingType.TensorWise
    return F.scaled_mm(
        x, weight.t(), step, whole, scale, whole, bias=bias, output_dtype=dtype, use_fast_accum=True
    )
