"""Products on a CPU by weights in 8 bits, computed by FBGEMM, in which no row depends on another.

A row is rounded to scale * (first + second / 128), where scale is its largest absolute value divided by 64,
first are the nearest integers, and second those nearest to 128 times what is left: 14 bits of its largest
input. (With first alone, 7 bits, SmolLM2-135M-Instruct prefers another token at 14 % of 279 positions, with
both at 1 %.) Both are rows of one product of integers, whose sums in 32 bits have one value in any order; the
floating point after it is elementwise. So the number of rows, the threads and the processor change no bit.

AVX2 adds pairs of products in 16 bits with saturation. FBGEMM stores an input plus 64, from 0 to 128, and 2 *
128 * 127 fits.
"""

from __future__ import annotations

import warnings

import torch

from headway.kernels.types._weights import Int8CpuWeight

MAX_INPUT, REST_STEPS = 64, 128
MAX_WEIGHT = 127
MAX_INT8_INPUTS = 1 << 17  # products of at most 128 * 127 whose sum fits into 32 bits
_LEAST_SCALE = 1e-30  # of a row or a weight of zeros
_ENGINE = "fbgemm"


def int8_cpu_linear(
    x: torch.Tensor,  # [rows, in] float32
    weight: Int8CpuWeight,
    bias: torch.Tensor | None,  # [out] float32
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, out] float32, of inputs rounded as above. A row with an infinity or
    a NaN has no finite result."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, weight.num_outputs)
    scales = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True)
    scales = scales.div_(MAX_INPUT).clamp_min_(_LEAST_SCALE)
    integers = x.new_empty(2 * num_rows, x.shape[1])
    first, second = integers[:num_rows], integers[num_rows:]
    torch.div(x, scales, out=second)
    torch.round(second, out=first)
    # FBGEMM rounds differently at the end of a vector: it is given integers.
    second.sub_(first).mul_(REST_STEPS).round_()
    products = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        integers, 1.0, MAX_INPUT, weight.packed
    )
    product: torch.Tensor = products[:num_rows].add_(products[num_rows:], alpha=1 / REST_STEPS).mul_(scales)
    return product if bias is None else product.add_(bias)


def has_int8_products() -> bool:
    """Returns whether this build of torch and this processor multiply integers of 8 bits by FBGEMM."""
    return _ENGINE in torch.backends.quantized.supported_engines


def can_be_int8(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] <= MAX_INT8_INPUTS
    )


def int8_cpu_weight(
    weight: torch.Tensor,  # [out, in] float32
) -> Int8CpuWeight:
    """Returns the weight rounded to 255 levels, from -127 to 127 times a scale of each output."""
    scales = weight.abs().amax(1).div_(MAX_WEIGHT).clamp_min_(_LEAST_SCALE)
    integers = weight.div(scales[:, None]).round_().to(torch.int8)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE  # by which torch chooses the layout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.13: a later one lacks such tensors
            quantized = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before
    return Int8CpuWeight(packed, *weight.shape)
