"""The memory by which the ranks of a model, each on its own GPU, exchange results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The most programs of a gather. All must run at once, so that there are not more than multiprocessors.
MAX_PROGRAMS = 64
_FLAG_BYTES = 8
# The most programs of a gather of flagged words, and the words of 4 bytes of each.
MAX_FLAGGED_PROGRAMS, FLAGGED_WORDS = 128, 1024


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's view of the memories of all ranks.

    A memory consists of one flag for each rank and program, [ranks, MAX_PROGRAMS] int64, two halves that
    gathers use in turn, [2, ranks, part_bytes], and two halves of flagged words, [2, ranks,
    MAX_FLAGGED_PROGRAMS, FLAGGED_WORDS] int64. A flag is the number of the gather whose part has arrived; a
    flagged word has that number in its upper half. Mutable: a rank's gathers change the memories of all ranks
    and its own counts.
    """

    memories: tuple[torch.Tensor, ...]  # of each rank [bytes] uint8, zero at first
    addresses: torch.Tensor  # [ranks] int64, of the memories
    # [2 + MAX_FLAGGED_PROGRAMS] int64, zero at first: finished gathers; finished programs of the next gather;
    # for each program the finished gathers of flagged words.
    counts: torch.Tensor
    rank: int
    part_bytes: int  # the most bytes of a rank in one launch, a multiple of 16

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.memories)

    @staticmethod
    def bytes_of(size: int, part_bytes: int) -> int:
        """Returns the size of a rank's memory in bytes, for `size` ranks."""
        flagged_bytes = 8 * MAX_FLAGGED_PROGRAMS * FLAGGED_WORDS
        return size * (MAX_PROGRAMS * _FLAG_BYTES + 2 * part_bytes + 2 * flagged_bytes)

    @property
    def flagged_start(self) -> int:
        """Returns the byte offset of the flagged words in a memory."""
        return self.size * (MAX_PROGRAMS * _FLAG_BYTES + 2 * self.part_bytes)

    @classmethod
    def of(
        cls,
        memories: tuple[torch.Tensor, ...],  # of each rank [bytes] uint8, zero
        rank: int,
        part_bytes: int,
    ) -> RankMemory:
        """Returns the rank's view before the first gather."""
        device = memories[rank].device
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=device)
        counts = torch.zeros(2 + MAX_FLAGGED_PROGRAMS, dtype=torch.int64, device=device)
        return cls(memories, addresses, counts, rank, part_bytes)
