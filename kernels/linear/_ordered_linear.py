"""Batch-invariant linear layers by several kernels that all keep one order of sums: by ascending input in one
float32 accumulator, then the bias, then one rounding before the rest of the epilogue. A row's result is the
same to the last bit among any number of rows, whichever kernel computes it.

Tensor cores give the same bits in tiles of any size, by any instruction and with either operand first, if the
inputs come in order. So does the library if it does not split sums (split-K): `keep_sums_whole` requests
that, and `library_is_ordered` tries it.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from torch.nn.functional import linear

from headway.kernels.elementwise.gated_mul import gated_mul
from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear._hopper_gated_gemm import dense_gated_linear
from headway.kernels.linear._hopper_gated_linear import streamed_gated_linear
from headway.kernels.linear._hopper_linear import streamed_linear
from headway.kernels.linear.batch_invariant_linear import batch_invariant_linear
from headway.kernels.linear.dispatch import MAX_ROWS, FusedOperation, LinearKernel, WeightFormat
from headway.kernels.runtime._stderr import without_stderr
from headway.kernels.types._epilogue import GateActivation

# The numbers of rows that are tried, and the largest result that is tried. More rows are multiplied in pieces
# of the last number tried.
_TRIED_ROWS = (
    65, 72, 96, 112, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
_MOST_TRIED = 1 << 28


def ordered_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
    *,
    gate: GateActivation | None = None,
    residual: torch.Tensor | None = None,  # [rows, outputs] float, added
    out: torch.Tensor | None = None,  # [rows, outputs] of x's type; may be the residual
    weight_format: WeightFormat = WeightFormat.ORDERED,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, outputs], or [rows, outputs / 2] with a gate. The product is
    rounded before the residual is added. No launch that is still running may write the weight."""
    assert residual is None or gate is None, "no kernel adds a gated product to a residual"
    kernel, streams = choice_of(x, weight, _operation(gate, bias), out, weight_format)
    if kernel in (LinearKernel.LIBRARY, LinearKernel.BATCH_INVARIANT):
        multiply = batch_invariant_linear if kernel is LinearKernel.BATCH_INVARIANT else _library_linear
        product = multiply(x, weight, bias)
        if residual is not None:
            return torch.add(residual, product, out=out)
        product = product if gate is None else gated_mul(product, gate)
        return product if out is None else out.copy_(product)
    outputs = weight.shape[0] if gate is None else weight.shape[0] // 2
    result = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device) if out is None else out
    if gate is None:
        assert streams is not None, "only gated products have another kernel"
        streamed_linear(x, weight, streams, result, bias=bias, residual=residual)
    elif streams is None:
        dense_gated_linear(x, weight, result, gate)
    else:
        streamed_gated_linear(x, weight, bias, result, streams, gate)
    return result


def _library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    most = _tried_rows(len(weight))[-1]
    if len(x) <= most:
        return linear(x, weight, bias)
    pieces = torch.split(x, most)
    return torch.cat(
        [ordered_linear(piece, weight, bias, weight_format=WeightFormat.LIBRARY_ORDERED) for piece in pieces]
    )


def _tried_rows(num_outputs: int) -> list[int]:
    return list(takewhile(lambda rows: rows * num_outputs <= _MOST_TRIED, _TRIED_ROWS)) or [_TRIED_ROWS[0]]


def _operation(gate: GateActivation | None, bias: torch.Tensor | None) -> FusedOperation:
    if gate is None:
        return FusedOperation.ADD
    return FusedOperation.GATED_MUL if bias is None else FusedOperation.GATED_MUL_BIASED


def keep_sums_whole() -> None:
    """Selects cuBLASLt for the whole process and forbids it to split the sums of 16-bit products; other
    libraries ignore that setting."""
    with without_stderr():
        torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def library_is_ordered(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Returns whether the library's products of more than MAX_ROWS rows have the bits of the kernel for fewer
    rows, which is tried on random inputs.

    weight: [outputs, inputs] float on a GPU. bias: [outputs]; only its presence matters, because the library
    adds a bias by other kernels. Returns False if the kernel for few rows does not support the weight.
    """
    outputs, inputs = weight.shape
    some = torch.empty(MAX_ROWS, inputs, dtype=weight.dtype, device=weight.device)
    if choice_of(some, weight, FusedOperation.ADD, None, WeightFormat.ORDERED).config is None:
        return False
    rows = _tried_rows(outputs)
    generator = torch.Generator(weight.device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=weight.dtype, device=weight.device, generator=generator)

    x, shift = random(rows[-1], inputs), None if bias is None else random(outputs)
    expected = torch.cat([ordered_linear(part, weight, shift) for part in torch.split(x, MAX_ROWS)])
    return all(torch.equal(linear(x[:n], weight, shift), expected[:n]) for n in rows)
