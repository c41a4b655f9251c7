"""Copies a round's results and the time to a ring in page-locked memory, which the host reads without a copy.

The launch is part of a round's graph. A copy after the graph took an H200 9 us between two rounds.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.transfer.copy_results_to_host import (
    copy_results_to_host as copy_results_to_host_twin,
)
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit_once_for, takes_triton, tl

# One iteration copies 400 rows of four tokens.
_BLOCK, _WARPS = 2048, 8


@jit_once_for("packed_ptr", "size", "num_places", "stride")
def _deliver_kernel(
    packed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    count_ptr: tl.tensor,
    size: tl.tensor,
    num_places: tl.tensor,
    stride: tl.tensor,
    TIME_INDEX: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A single program copies everything."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    count = tl.load(count_ptr)
    place_ptr = places_ptr + count % num_places * stride
    tl.store(place_ptr, count)
    # Each thread reads its own clock, so that the thread that writes the time to the ring must write it to
    # packed, too. That is why the kernel is compiled for an unaligned packed: with loads of two numbers per
    # thread and stores of one, other threads would store the numbers.
    time = tl.extra.cuda.globaltimer() if HAS_CLOCK else 0
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        values = tl.load(packed_ptr + index, mask=index < size, other=0)
        if HAS_CLOCK:
            values = tl.where(index == TIME_INDEX, time, values)
            tl.store(packed_ptr + index, values, mask=index == TIME_INDEX)
        tl.store(place_ptr + 1 + index, values, mask=index < size)
    # One thread writes the count after all have read it.
    tl.debug_barrier()
    tl.store(count_ptr, count + 1)


def copy_results_to_host(
    packed: torch.Tensor,  # [n] int64; the time at time_index is written
    places: torch.Tensor,  # [m, n + 1 or more] int64, one of them written
    count: torch.Tensor,  # [1] int64: calls so far; += 1
    *,
    time_index: int,
) -> None:
    """Writes count and then packed to entry count % m of the ring. packed[time_index] becomes the time in
    nanoseconds, as in `stamp`.

    places: on the device, or page-locked on the host. The interpreter has no clock and does not write the
    time.
    """
    assert 0 <= time_index < len(packed) < places.shape[1], (time_index, len(packed), tuple(places.shape))
    if not takes_triton(packed):
        copy_results_to_host_twin(packed, places, count, time_index=time_index)
        return
    check_dense(packed, count)
    assert places.stride(1) == 1, places.stride()
    overlaps, launch = overlap(packed.device)
    _deliver_kernel[(1,)](
        packed, places, count, len(packed), len(places), places.stride(0), TIME_INDEX=time_index,
        HAS_CLOCK=packed.is_cuda, BLOCK=_BLOCK, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
    )  # fmt: skip
