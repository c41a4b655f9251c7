"""The product of a gate and its `up` with a fused gated activation: skinny GEMMs compute few rows,
_hopper_gated_gemm.py many.

PyTorch multiplies numbers of rows between these, odd shapes and other types, and the activation is another
launch.
"""

from __future__ import annotations

import torch

from headway.kernels.elementwise._gated_product import gated_product
from headway.kernels.elementwise.gated_mul import gated_mul
from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear._hopper_gated_gemm import dense_gated_linear
from headway.kernels.linear._hopper_gated_linear import streamed_gated_linear
from headway.kernels.linear._skinny_core import (
    Cut,
    constants_of,
    cut_of,
    deferred_factor,
    first_weights,
    is_second,
    load_squares,
    pair_of,
    split_pairs,
    sum_products,
)
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel
from headway.kernels.reference.linear.gated_linear import gated_linear as gated_linear_twin
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import blocks_of, jit_once_for, takes_triton, tl
from headway.kernels.types._deferred_norm import DeferredNorm
from headway.kernels.types._epilogue import GateActivation


@jit_once_for("num_rows", "num_outputs")
def _gated_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    SQUARES: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    DEPENDENTS_AT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS rows of the weight: half are rows of the gate, half the rows of `up` that
    are paired with them."""
    place, row = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    first_output = tl.program_id(0) * (OUTPUTS // 2)
    paired_output = tl.minimum(first_output + pair_of(place), num_outputs - 1)
    weight_row = paired_output + tl.where(is_second(place), num_outputs, 0)
    weights_ptr = first_weights(weight_ptr, weight_row, num_inputs, 0, SPLIT, CUT, FETCHES_AHEAD)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if SQUARES > 0:
        squares = load_squares(squares_ptr, num_rows, num_inputs, ROWS, SQUARES)
    sums = sum_products(
        x_ptr, weights_ptr, num_rows, num_inputs, x_stride, 0,
        ROWS, OUTPUTS, INPUTS, SPLIT, CUT, OVERLAPS, DEPENDENTS_AT,
    )  # fmt: skip
    if SQUARES > 0:
        sums *= deferred_factor(squares, num_inputs, EPSILON)[None, :]
    if HAS_BIAS:
        sums += bias[:, None]
    gate, up = split_pairs(sums.to(out_ptr.dtype.element_ty), ROWS, OUTPUTS)
    result = gated_product(gate, up, ACTIVATION)
    output = first_output + tl.arange(0, OUTPUTS // 2)
    out_cell = out_ptr + row[None, :] * out_stride + output[:, None]
    is_cell = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    tl.store(out_cell, result, mask=is_cell)


def gated_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [2 * outputs, inputs] float: gate, then up
    bias: torch.Tensor | None = None,  # [2 * outputs] float
    *,
    activation: GateActivation = "silu",
    norm: DeferredNorm | None = None,  # of x
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns activation(x @ gate.T) * (x @ up.T), [rows, outputs]. The bias is added to both products. The
    products, the activation and the result are each rounded once.

    No launch that is still running may write the weight, because it may be read before the preceding launch
    has ended.
    """
    operation = FusedOperation.GATED_MUL if bias is None else FusedOperation.GATED_MUL_BIASED
    operation = operation if norm is None else FusedOperation.GATED_MUL_DEFERRED
    kernel, streams = choice_of(x, weight, operation, out)
    is_library = kernel is LinearKernel.LIBRARY
    if not takes_triton(x) or (norm is not None and is_library):
        return gated_linear_twin(x, weight, bias, activation=activation, norm=norm, out=out)
    assert all(t is None or t.stride(-1) == 1 for t in (bias, out)), "outputs are adjacent in memory"
    if is_library:
        gated = gated_mul(torch.nn.functional.linear(x, weight, bias), activation)
        return gated if out is None else out.copy_(gated)
    shape = x.shape[0], weight.shape[0] // 2
    result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if streams is not None:
        streamed_gated_linear(x, weight, bias, result, streams, activation)
    elif kernel is LinearKernel.SKINNY:
        _launch_few(x, weight, bias, norm, result, activation)
    else:
        dense_gated_linear(x, weight, result, activation)
    return result


def _launch_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: DeferredNorm | None,
    out: torch.Tensor,
    activation: GateActivation,
) -> None:
    (rows, num_inputs), num_outputs = x.shape, out.shape[1]
    cut = _cut(num_outputs, x)
    _gated_kernel[(blocks_of(num_outputs, cut.outputs // 2),)](
        x, weight, x if bias is None else bias, x if norm is None else norm.squares, out,
        rows, num_outputs, num_inputs, x.stride(0), out.stride(0),
        SQUARES=0 if norm is None else norm.squares.shape[1], EPSILON=0.0 if norm is None else norm.epsilon,
        HAS_BIAS=bias is not None, ACTIVATION=activation,
        **constants_of(cut, x),
    )  # fmt: skip


def _cut(num_outputs: int, x: torch.Tensor) -> Cut:
    """Returns small tiles if large ones would use at most half of the multiprocessors."""
    if blocks_of(2 * num_outputs, 64) <= multiprocessors(x.device):
        return cut_of(2 * num_outputs, x)._replace(split=1)
    return Cut(128, 64, 1, 4, 1, False)
