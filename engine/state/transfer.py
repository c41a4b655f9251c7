"""Copies from the host to the device without making either wait, and waits for the device where a caller
wants that."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]] | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Returns a tensor of the values on the device, valid for all later launches on the current stream."""
    return _on_host(values, device, dtype).to(device, non_blocking=True)


def copy_to_device(values: Sequence[int], target: torch.Tensor) -> None:
    """Writes the values to the beginning of the target, for all later launches. The rest stays."""
    host = _on_host(values, target.device, target.dtype)
    target[: len(host)].copy_(host, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Returns when all launches on the device are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_host(
    values: Sequence[float] | Sequence[Sequence[float]] | torch.Tensor,
    device: torch.device,  # where they go
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the values on the host, in page-locked memory if they go to CUDA: a copy from pageable memory
    would wait for every kernel launched before it. PyTorch reuses page-locked memory only after the copy."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory() if device.type == "cuda" else host
