"""Reads memory from end to end with nearly no computation, to measure the bandwidth of the device."""

from __future__ import annotations

import torch

from headway.kernels.reference.transfer.stream_read import stream_read as stream_read_twin
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import check_dense, jit, takes_triton, tl

_BLOCK, _PROGRAMS_EACH, _WARPS = 4096, 8, 8


@jit
def _stream_read_kernel(
    data_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The programs read adjacent blocks of BLOCK numbers at a time."""
    program = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    most = tl.full((BLOCK,), -2147483648, tl.int32)
    for first in range(program * BLOCK, size, stride):
        place = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(data_ptr + place, mask=place < size, other=-2147483648))
    tl.store(out_ptr + program, tl.max(most, axis=0))


def stream_read(
    data: torch.Tensor,  # [n] int32, n >= 1
) -> torch.Tensor:
    """Returns the greatest number, [] int32."""
    if takes_triton(data):
        check_dense(data)
        programs = _PROGRAMS_EACH * multiprocessors(data.device)
        out = torch.empty(programs, dtype=torch.int32, device=data.device)
        _stream_read_kernel[(programs,)](data, out, data.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
        return out.amax()
    return stream_read_twin(data)
