"""Where rounds leave what the host reads: page-locked memory that the rounds write themselves, by turns."""

from __future__ import annotations

import torch

from headway.kernels import publish

# Of a round that runs, of one behind it that is launched, and of one whose results are being read.
_NUM_PLACES = 3


class HostRing:
    """Mutable: rounds on the device and the runner go from place to place in step, a place a round."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: of the largest result."""
        is_gpu = device.type == "cuda"
        self._places = torch.zeros(_NUM_PLACES, size, dtype=torch.int64, pin_memory=is_gpu)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_taken = 0

    def publish(
        self,
        packed: torch.Tensor,  # [n] int64
        *,
        time_index: int,
    ) -> None:
        """Launched at the end of a round; see the kernel."""
        publish(packed, self._places, self._count, time_index=time_index)

    def take(self, size: int) -> torch.Tensor:
        """[size] int64 on the host: the first numbers of what the round launched last leaves. To be read when that is done,
        and before the third round behind it is launched."""
        place = self._places[self._num_taken % _NUM_PLACES, :size]
        self._num_taken += 1
        return place

    def restart(self) -> None:
        """What rounds have left without being taken is forgotten. Only while none is under way."""
        self._count.zero_()
        self._num_taken = 0
