"""Activations whose bits depend neither on the position of an element in its tensor nor on the number of
threads.

On a CPU `torch.sigmoid`, `silu`, `softplus`, `gelu` and `pow` compute the last elements of a thread's part of
a tensor by other instructions than the rest, and so does `rsqrt` in 16-bit types. `exp`, `log1p` and
arithmetic operations do not.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from headway.kernels.types._epilogue import GateActivation

BYTES_AT_ONCE = 128  # two vectors of AVX-512
# The most elements that ATen gives to one thread: less than its GRAIN_SIZE of 2**15 for silu; gelu has its
# own limit.
_ELEMENTS_OF_ONE_THREAD: dict[GateActivation, int] = {"silu": 2**15 - 1, "gelu_tanh": 2**14}


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns x in float32, or x itself if it has float32 or float64."""
    return x if x.dtype == torch.float64 else x.float()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    growth = torch.neg(x).exp_().add_(1)
    return torch.div(x, growth, out=growth)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def gated_product(
    gate: torch.Tensor,  # [tokens, n]: columns of a wider tensor
    up: torch.Tensor,  # [tokens, n]
    activation: GateActivation,
) -> torch.Tensor:
    """Returns activation(gate) * up in their dtype. The activation is rounded before it is multiplied.

    PyTorch's silu takes a third of the time of the one above. It computes columns of a wider tensor row by
    row, each row by the same instructions, unless a thread begins within a row. So only as many elements are
    computed at a time as one thread gets. PyTorch computes the columns after the last multiple of
    BYTES_AT_ONCE by other instructions, so that the gate is padded to such a multiple: otherwise the bits of
    a rank's share of the columns would differ. Its gelu behaves in the same way.
    """
    most, width = _ELEMENTS_OF_ONE_THREAD[activation], gate.shape[1]
    missing = -width % (BYTES_AT_ONCE // gate.element_size())
    if missing > 0:
        gate = functional.pad(gate, (0, missing))
    if gate.numel() <= most:
        return _activated(gate, activation)[:, :width].mul_(up).contiguous()
    step = max(most // gate.shape[1], 1)
    parts = zip(torch.split(gate, step), torch.split(up, step), strict=True)
    return torch.cat([_activated(some, activation)[:, :width].mul_(others) for some, others in parts])


def _activated(gate: torch.Tensor, activation: GateActivation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh")
