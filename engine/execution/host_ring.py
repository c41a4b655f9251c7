"""Where rounds leave what the host reads: page-locked memory that the rounds write themselves, by turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.kernels import copy_results_to_host

# Of a round that runs, of one behind it that is launched, and of one whose results are being read.
_NUM_PLACES = 3
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Place:
    """What one round leaves; there once it is done, until the third round behind it is launched."""

    number: int
    size: int  # of the results that are wanted
    memory: torch.Tensor  # [1 + size or more] int64, on the host: the round's number, then its results

    def read(self) -> list[int]:
        """[size]."""
        number, *results = self.memory[: 1 + self.size].tolist()
        assert number == self.number, f"round {self.number} was to be here, not {number}"
        return results


class HostRing:
    """Mutable: rounds on the device and the runner go from place to place in step, a place a round."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: of the largest result."""
        is_gpu = device.type == "cuda"
        self._places = torch.zeros(_NUM_PLACES, 1 + size, dtype=torch.int64, pin_memory=is_gpu)
        # Made once: each look at a part of a tensor costs the host microseconds, in every round.
        self._memory_by_place = self._places.unbind()
        self._number_by_place = self._places[:, 0].unbind()
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_taken = 0

    def deliver(
        self,
        packed: torch.Tensor,  # [n] int64
        *,
        time_index: int,
    ) -> None:
        """Launched behind a round; see the kernel."""
        copy_results_to_host(packed, self._places, self._count, time_index=time_index)

    def take(self, size: int) -> Place:
        """Before a round is launched: where it will leave its results, of which so many numbers are wanted."""
        number = self._num_taken
        self._num_taken += 1
        place = number % _NUM_PLACES
        self._number_by_place[place].fill_(_NOBODY)
        return Place(number, size, self._memory_by_place[place])

    def restart(self) -> None:
        """What rounds have left without being taken is forgotten. Only while none is under way."""
        self._count.zero_()
        self._num_taken = 0
