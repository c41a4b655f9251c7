"""Products on a CPU whose rows do not depend on one another, not even in their last bit.

A GEMM over few rows may round differently from one over many. This is ruled out in one of two ways: float32
weights are packed for oneDNN, whose sums run in one order whatever the number of rows (tried on this machine
before it is relied on); all others are products of `padded_linear`.
"""

from __future__ import annotations

import platform

import torch

from headway.kernels.reference.linear._padded_linear import padded
from headway.kernels.types._weights import PackedCpuWeight

CAN_PACK = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
TRIED_ROW_COUNTS = (2, 3, 4, 5, 8, 16, 17, 32, 64, 100, 256, 304, 512)


def packed_linear(
    x: torch.Tensor,  # [rows, in] float32
    weight: PackedCpuWeight,
    bias: torch.Tensor | None,  # [out] float32
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, out]."""
    num_rows = x.shape[0]
    if num_rows >= weight.least_rows:
        return _multiply_packed(x, weight.packed, bias)
    return _multiply_packed(padded(x, weight.least_rows), weight.packed, bias)[:num_rows]


def can_be_packed(weight: torch.Tensor) -> bool:
    return CAN_PACK and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_weight(
    weight: torch.Tensor,  # [out, in] float32
    *,
    least_rows: int,
) -> PackedCpuWeight:
    return PackedCpuWeight(_packed(weight), least_rows)


def least_packed_rows(
    weight: torch.Tensor,  # [out, in] float32
    bias: torch.Tensor | None,  # [out] float32
) -> int | None:
    """Returns the least number of rows from which a row's packed result is the same for any number: 1, 2 or
    None.

    A single row may be computed in another way, as on AVX-512 when a row is longer than 1024.
    """
    packed, in_size = _packed(weight), weight.shape[1]
    rows = torch.randn(max(TRIED_ROW_COUNTS), in_size, generator=torch.Generator().manual_seed(0))
    most = _multiply_packed(rows, packed, bias)
    for count in TRIED_ROW_COUNTS:
        if not torch.equal(_multiply_packed(rows[:count], packed, bias), most[:count]):
            return None
    single = _multiply_packed(rows[:1], packed, bias)
    return 1 if torch.equal(single, most[:1]) else 2


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
