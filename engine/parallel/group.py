"""The group of ranks that are processes of one machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch.distributed import ProcessGroupGloo, Work

from headway.engine.layers.group import ALONE, Group

# The longest that a rank waits for the others: all of them launch the same work.
WAIT_SECONDS = 60.0


class RankError(Exception):
    """A rank of the group has ended, or computes no more, so that none can go on."""


class _Gatherer(Protocol):
    """The part of ProcessGroupGloo that is used, which torch's type stubs leave out."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...


class ProcessGroup:
    """Ranks that gather over the loopback interface, by torch's Gloo. Mutable: `connect` comes before the
    first gather; a rank's share of a model can be described and loaded before."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._gloo: _Gatherer | None = None

    def connect(self, folder: Path) -> None:
        """Waits until all ranks are connected. folder: empty, where they find each other; it is not needed
        after that. Raises RankError."""
        # torch's type stubs export neither the options nor the store.
        options = vars(ProcessGroupGloo)["_Options"]()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=WAIT_SECONDS)
        make = cast("Callable[..., _Gatherer]", ProcessGroupGloo)
        try:
            store = vars(torch.distributed)["FileStore"](str(folder / "ranks"), self.size)
            self._gloo = make(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} found not all others: {error}") from error
        self.gather(torch.zeros(1, 1))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, n], of this rank, of any dtype. Returns [tokens, size * n]: those of all ranks, in
        their order. Raises RankError."""
        assert self._gloo is not None, "the ranks are connected"
        own = x.contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        try:
            self._gloo.allgather([parts], [own]).wait()
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} lost another one: {error}") from error
        return torch.cat(parts, dim=1).view(x.dtype)


def group_of(size: int, rank: int = 0) -> Group:
    """Returns the rank's group, which is not connected yet."""
    return ALONE if size == 1 else ProcessGroup(rank, size)
