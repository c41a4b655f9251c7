"""The time at which the work launched so far is done, read on the device: no host, no event, capturable."""

from __future__ import annotations

import torch

from headway.kernels._triton import jit, tl
from headway.kernels.reference.stamp import stamp as stamp_twin


@jit
def _stamp_kernel(out_ptr: tl.tensor) -> None:
    tl.store(out_ptr, tl.extra.cuda.globaltimer())


def stamp(
    out: torch.Tensor,  # [1] int64, written
) -> None:
    """Nanoseconds of a clock that only runs on; only differences mean anything."""
    if out.is_cuda:
        _stamp_kernel[(1,)](out, num_warps=1)
    else:
        stamp_twin(out)
