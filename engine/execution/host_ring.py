"""Rings of page-locked memory to which rounds write their results for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.kernels import copy_results_to_host

# The slots of the running round, of the round launched after it, and of the round whose results are read.
_NUM_SLOTS = 3
_NOBODY = -1
_NOT_THERE = -(1 << 63)


@dataclass(frozen=True, slots=True)
class RingSlot:
    """The results of one round. They are valid from the end of the round until the third round after it is
    launched."""

    number: int
    size: int  # of the results that are wanted
    memory: torch.Tensor  # [1 + size or more] int64, on the host: the round's number, then its results

    def read(self) -> list[int]:
        """Returns the results, [size]."""
        number, *results = self.memory[: 1 + self.size].tolist()
        assert number == self.number, f"round {self.number} was to be here, not {number}"
        return results

    def read_early(self) -> list[int] | None:
        """Returns the results of a round that may still run; None while some are missing. The slot must have
        been taken with is_read_early."""
        results: list[int] = self.memory[1 : 1 + self.size].tolist()
        return None if _NOT_THERE in results else results


class HostRing:
    """Mutable: rounds on the device write the slots in turn, and the runner takes one for each round."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: the numbers of the largest result."""
        is_gpu = device.type == "cuda"
        self._slots = torch.zeros(_NUM_SLOTS, 1 + size, dtype=torch.int64, pin_memory=is_gpu)
        # These views are made once, since making one costs microseconds in every round.
        self._memory_by_slot = self._slots.unbind()
        self._number_by_slot = self._slots[:, 0].unbind()
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_taken = 0

    def deliver(
        self,
        packed: torch.Tensor,  # [n] int64
        *,
        time_index: int,
    ) -> None:
        """Launches the kernel that writes a round's results to its slot, and the end time to
        packed[time_index]."""
        copy_results_to_host(packed, self._slots, self._count, time_index=time_index)

    def take(self, size: int, *, is_read_early: bool = False) -> RingSlot:
        """Returns the slot of the round that is launched next. size: the numbers of its results that are
        wanted.

        is_read_early: the results are read before the round is done. They then arrive one by one, in any
        order."""
        number = self._num_taken
        self._num_taken += 1
        slot = number % _NUM_SLOTS
        self._number_by_slot[slot].fill_(_NOBODY)
        if is_read_early:
            self._memory_by_slot[slot][1 : 1 + size].fill_(_NOT_THERE)
        return RingSlot(number, size, self._memory_by_slot[slot])

    def restart(self) -> None:
        """Restarts the count of rounds, after some that took no slot. Called only while no round runs."""
        self._count.zero_()
        self._num_taken = 0
