"""Batch-invariant products on a CPU: no row depends on another, not even in its last bit.

A GEMM over few rows may round differently from one over many. Float32 products are oneDNN's, whose sums have
one order for any number of outputs and, as is tried on this machine first, of rows. All other products are
those of `padded_linear`.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch

from headway.kernels.reference.linear._padded_linear import padded, padded_linear
from headway.kernels.types._weights import PackedCpuWeight

CAN_PACK = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
TRIED_ROW_COUNTS = (2, 3, 4, 5, 8, 16, 17, 32, 64, 100, 256, 304, 512)


def packed_linear(
    x: torch.Tensor,  # [rows, in] float32
    weight: PackedCpuWeight,
    bias: torch.Tensor | None,  # [out] float32
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, out]."""
    return _multiply(x, weight.packed, bias, weight.least_rows)


def plain_cpu_linear(
    x: torch.Tensor,  # [rows, in] float
    weight: torch.Tensor,  # [out, in] float, as a checkpoint has it
) -> torch.Tensor:
    """Returns x @ weight.T, [rows, out]. A row's result does not depend on other rows, nor, if oneDNN
    multiplies, on other outputs."""
    if can_be_packed(weight):
        least_rows = _least_plain_rows(*weight.shape, num_threads=torch.get_num_threads())
        if least_rows is not None:
            return _multiply(x, weight, None, least_rows)
    return padded_linear(x, weight, None)


def can_be_packed(weight: torch.Tensor) -> bool:
    """Returns whether oneDNN packs such a weight on this machine: a float32 weight on an x86-64 CPU."""
    return CAN_PACK and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_weight(
    weight: torch.Tensor,  # [out, in] float32
    *,
    least_rows: int,
) -> PackedCpuWeight:
    """Returns the weight in oneDNN's layout. least_rows: the result of `least_packed_rows`."""
    return PackedCpuWeight(_packed(weight), least_rows)


def least_packed_rows(
    weight: torch.Tensor,  # [out, in] float32
    bias: torch.Tensor | None,  # [out] float32
) -> int | None:
    """Returns the number of rows, 1 or 2, from which on a row's packed result is the same for any number of
    rows; None if it never is.

    A single row may be computed differently, for example on AVX-512 if it is longer than 1024.
    """
    packed = _packed(weight)
    return _least_rows(lambda rows: _onednn_linear(rows, packed, bias), weight.shape[1])


@functools.cache
def _least_plain_rows(num_outputs: int, num_inputs: int, *, num_threads: int) -> int | None:
    """Returns `least_packed_rows` of a weight that is not packed. It may depend on the number of threads."""
    weight = torch.zeros(num_outputs, num_inputs).normal_(generator=torch.Generator().manual_seed(1))
    return _least_rows(lambda rows: _onednn_linear(rows, weight, None), num_inputs)


def _least_rows(multiply: Callable[[torch.Tensor], torch.Tensor], num_inputs: int) -> int | None:
    """Returns `least_packed_rows` for this product, [rows, in] -> [rows, out]."""
    rows = torch.randn(max(TRIED_ROW_COUNTS), num_inputs, generator=torch.Generator().manual_seed(0))
    most = multiply(rows)
    if not all(torch.equal(multiply(rows[:count]), most[:count]) for count in TRIED_ROW_COUNTS):
        return None
    return 1 if torch.equal(multiply(rows[:1]), most[:1]) else 2


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, least_rows: int
) -> torch.Tensor:
    if len(x) >= least_rows:
        return _onednn_linear(x, weight, bias)
    return _onednn_linear(padded(x, least_rows), weight, bias)[: len(x)]


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
