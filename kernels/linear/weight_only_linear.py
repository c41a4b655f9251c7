"""Weight-only quantised linear layers with bfloat16 inputs, with the bits of products with the expanded
weight.

Up to 128 rows read the codes. More rows multiply an expanded copy, which is made for the product and freed
after it: the expansion of 178 million weights takes an H200 as long as their product with about 100 rows.
"""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_quantized import streamed_quantized_linear
from headway.kernels.linear._ordered_linear import ordered_linear
from headway.kernels.linear._quantized_weight import expanded_weight, multiplies_codes
from headway.kernels.linear.dispatch import WeightFormat
from headway.kernels.reference.linear.weight_only_linear import weight_only_linear as weight_only_linear_twin
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._weights import QuantizedWeight


def weight_only_linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,  # [outputs] bfloat16
    *,
    gate: GateActivation | None = None,  # the weight's outputs are paired, without one they are not
    residual: torch.Tensor | None = None,  # [rows, outputs] bfloat16, added
    out: torch.Tensor | None = None,  # [rows, outputs] bfloat16; may be the residual
) -> torch.Tensor:
    """Returns what `ordered_linear` returns for the expanded weight. No launch that is still running may
    write the weight."""
    assert residual is None or gate is None, "no kernel adds a gated product to a residual"
    if not x.is_cuda:
        return weight_only_linear_twin(x, weight, bias, gate=gate, residual=residual, out=out)
    if not multiplies_codes(x):
        weight_format = WeightFormat.LIBRARY_ORDERED if weight.is_library_ordered else WeightFormat.ORDERED
        expanded = expanded_weight(weight)
        return ordered_linear(
            x, expanded, bias, gate=gate, residual=residual, out=out, weight_format=weight_format
        )
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    result = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device) if out is None else out
    if weight.rest is None:
        streamed_quantized_linear(x, weight, result, bias=bias, residual=residual, gate=gate)
        return result
    assert gate is None, "gates are all codes"
    coded = weight._replace(rest=None)
    for part in (slice(weight.num_coded), slice(weight.num_coded, None)):
        own, own_bias, own_residual = (
            result[:, part],
            None if bias is None else bias[part],
            None if residual is None else residual[:, part],
        )
        if part.start is None:
            streamed_quantized_linear(x, coded, own, bias=own_bias, residual=own_residual)
        else:
            ordered_linear(x, weight.rest, own_bias, residual=own_residual, out=own)
    return result
