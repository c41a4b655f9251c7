"""Batch-invariant quantised GEMM on an x86 CPU, with weights of 4 or 8 bits.

Inputs and weights are quantised in groups of 32. Inputs and weights of 8 bits become integers from -127 to
127 times a scale, weights of 4 bits integers from 0 to 15 times a scale, plus a minimum. These are the blocks
Q8_0 and Q4_1 of GGUF files: a weight that was read from such a file gets its blocks back, bit by bit.
Products within a group are summed as integers, which is exact. Groups are added in their order, in one chain
of float32 for each output, so that the number of rows, the threads and the processor change no bit.

No operation of PyTorch 2.13 is batch-invariant and fast. One row times [1536, 576] takes on one thread with
AVX2: 25 us here in 4 bits, 167 in float32 of oneDNN, 162 in 8 bits of FBGEMM, 137 in bfloat16 and 1,875 in
float32 of `_weight_int4pack_mm_for_cpu`. onnxruntime's MatMulNBits takes 66, with other bits for one row than
for many.

The C source is compiled when it is first needed: see `cpu_library`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from headway.kernels.elementwise.gated_mul import gated_mul
from headway.kernels.runtime._cpu_library import cpu_library
from headway.kernels.types._epilogue import PLAIN, Epilogue
from headway.kernels.types._weights import IntegerCpuWeight

GROUP, TILE = 32, 8  # inputs that share a scale; outputs that are computed together
_BYTES = {4: 2 + 2 + GROUP // 2, 8: 2 + GROUP}  # of a group of an output: scale, minimum (4 bits), codes
_MIN_PRODUCTS = 1 << 17  # of a thread: starting a thread takes as long as these products
_SOURCE = Path(__file__).with_name("integer_cpu_linear.c")


def integer_cpu_linear(
    x: torch.Tensor,  # [rows, in] float32
    weight: IntegerCpuWeight,
    epilogue: Epilogue = PLAIN,  # tensors in float32; a residual only with a next norm
) -> torch.Tensor:
    """Returns x @ weight.T with its epilogue, [rows, out] float32, or [rows, out / 2] with a gate. x is
    quantised as above. A next norm is applied completely. A row with an infinity or a NaN becomes NaN. Raises
    MemoryError if there is no memory for the quantised inputs."""
    bias, gate, residual, norm = epilogue
    assert (residual is None) == (norm is None), "a residual is added before a norm"
    assert gate is None or norm is None, "nothing computes both"
    library = _library()
    assert library is not None, "a weight is packed only where products can be compiled"
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    product, result = x.new_empty(rows, weight.num_outputs), None
    if gate == "silu":
        result = x.new_empty(rows, weight.num_outputs // 2)
    elif residual is not None:
        assert residual.is_contiguous(), residual.stride()
        result = torch.empty_like(residual)
    threads = min(torch.get_num_threads(), 1 + rows * inputs * weight.num_outputs // _MIN_PRODUCTS)
    if library.multiply(
        x.data_ptr(), rows, inputs, x.stride(0), weight.tiles.data_ptr(), weight.num_outputs, weight.bits,
        product.data_ptr(), threads, _pointer(bias), _pointer(result), _pointer(residual),
        *((None, 0, 0) if norm is None else (norm.weight.data_ptr(), norm.epsilon, norm.unit_offset)),
    ):  # fmt: skip
        raise MemoryError(f"no memory for {rows:,} rows of {inputs:,} inputs in 8 bits")
    if gate is not None and result is None:
        return gated_mul(product, gate)
    return product if result is None else result


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def has_integer_products() -> bool:
    """Returns whether this machine can compile and run these products. Logs once what is missing."""
    return _library() is not None


def can_be_integers(weight: torch.Tensor) -> bool:
    """Returns whether `integer_cpu_weight` accepts the weight: it has float32 on a CPU."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def integer_cpu_weight(
    weight: torch.Tensor,  # [out, in] float32
    *,
    bits: Literal[4, 8],
) -> IntegerCpuWeight:
    """Returns the weight, rounded to the nearest codes, in the order of the kernel. Requires
    `has_integer_products`."""
    assert can_be_integers(weight), (weight.device, weight.dtype)
    assert weight.is_contiguous(), weight.stride()
    library = _library()
    assert library is not None, "nothing multiplies by such a weight here"
    outputs, inputs = weight.shape
    tiles = torch.empty(-(-outputs // TILE), -(-inputs // GROUP), TILE * _BYTES[bits], dtype=torch.uint8)
    library.round_weight(weight.data_ptr(), outputs, inputs, bits, tiles.data_ptr(), torch.get_num_threads())
    return IntegerCpuWeight(tiles, bits, outputs, inputs)


def integer_cpu_bytes(shape: tuple[int, int], *, bits: Literal[4, 8]) -> int:  # of [out, in]
    """Returns the bytes of such a weight: codes, and for each group a scale and, in 4 bits, a minimum."""
    outputs, inputs = shape
    return -(-outputs // TILE) * TILE * -(-inputs // GROUP) * _BYTES[bits]


@cache
def _library() -> ctypes.CDLL | None:
    library = cpu_library(_SOURCE)
    if library is not None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
        library.multiply.argtypes = (
            pointer, size, size, size, pointer, size, number, pointer, number,
            pointer, pointer, pointer, pointer, ctypes.c_float, ctypes.c_float,
        )  # fmt: skip
        library.round_weight.argtypes = (pointer, size, size, number, pointer, number)
        library.round_weight.restype = None
    return library
