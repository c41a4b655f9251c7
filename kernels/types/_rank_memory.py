"""Memory by which the ranks of a model, each on a GPU of its own, hand each other what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Programs of one gather, all of which must run at once: no more than a GPU has multiprocessors.
MAX_PROGRAMS = 64
_FLAG_BYTES = 8
# Of a gather whose numbers carry their own flags: its programs, and the words of 4 bytes of each.
MAX_FLAGGED_PROGRAMS, FLAGGED_WORDS = 128, 1024


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank sees of the memories of all ranks.

    A memory is one flag for each rank and program, [ranks, MAX_PROGRAMS] int64, two halves that gathers use
    in turn, [2, ranks, part_bytes], and two halves of flagged words, [2, ranks, MAX_FLAGGED_PROGRAMS,
    FLAGGED_WORDS] int64. A flag is the number of the gather whose part is there; a flagged word has it in its
    upper half. Mutable: its gathers change the memories of all ranks and the counts of its own.
    """

    memories: tuple[torch.Tensor, ...]  # of each rank [bytes] uint8, zero at first
    addresses: torch.Tensor  # [ranks] int64, of the memories
    # [2 + MAX_FLAGGED_PROGRAMS] int64, zero at first: gathers that are done, programs of the next that are,
    # and of each program the gathers of flagged words that are done.
    counts: torch.Tensor
    rank: int
    part_bytes: int  # the most of a rank that is gathered at once, a multiple of 16

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.memories)

    @staticmethod
    def bytes_of(size: int, part_bytes: int) -> int:
        """Returns the bytes of a rank's memory."""
        flagged_bytes = 8 * MAX_FLAGGED_PROGRAMS * FLAGGED_WORDS
        return size * (MAX_PROGRAMS * _FLAG_BYTES + 2 * part_bytes + 2 * flagged_bytes)

    @property
    def flagged_start(self) -> int:
        """Returns the byte of a memory at which its flagged words begin."""
        return self.size * (MAX_PROGRAMS * _FLAG_BYTES + 2 * self.part_bytes)

    @classmethod
    def of(
        cls,
        memories: tuple[torch.Tensor, ...],  # of each rank [bytes] uint8, zero
        rank: int,
        part_bytes: int,
    ) -> RankMemory:
        """Returns what the rank sees before the first gather."""
        device = memories[rank].device
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=device)
        counts = torch.zeros(2 + MAX_FLAGGED_PROGRAMS, dtype=torch.int64, device=device)
        return cls(memories, addresses, counts, rank, part_bytes)
