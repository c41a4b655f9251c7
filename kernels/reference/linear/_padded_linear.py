"""Batch-invariant products on a CPU with any weight: rows are padded with zeros to a multiple of ROW_MULTIPLE
and multiplied up to ROWS_AT_ONCE at a time, so that no row depends on another."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# An Emerald Rapids Xeon sums in another order from 192 rows on in float64, from 304 in float32.
ROW_MULTIPLE, ROWS_AT_ONCE = 16, 128


def padded_linear(
    x: torch.Tensor,  # [rows, in] float
    weight: torch.Tensor,  # [out, in] float
    bias: torch.Tensor | None,  # [out] float
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, out]."""
    num_rows = x.shape[0]
    padding = -num_rows % ROW_MULTIPLE
    some = padded(x, num_rows + padding) if padding > 0 else x
    products = [F.linear(rows, weight, bias) for rows in torch.split(some, ROWS_AT_ONCE)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:num_rows]


def padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, num_rows - x.shape[0]))
