"""The group of ranks that are processes of one machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import ProcessGroup as TorchGroup
from torch._C._distributed_c10d import Store, _register_process_group, _SymmetricMemory
from torch.distributed import ProcessGroupGloo, Work

from headway.engine.layers.group import ALONE, Group
from headway.kernels import RankMemory, gather_ranks

# The longest time that a rank waits for the others. All of them launch the same work, and the first one
# compiles the kernels.
WAIT_SECONDS = 600.0
# The most bytes of a rank's part of a gather on GPUs; larger parts are gathered piece by piece.
PART_BYTES = 16 << 20


class RankError(Exception):
    """A rank of the group has ended or hangs, so that no rank can continue."""


class _Gatherer(Protocol):
    """The used part of ProcessGroupGloo, which torch's type stubs leave out."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...


class ProcessGroup:
    """Ranks that gather tensors on CPUs by torch's Gloo over the loopback interface, and tensors on GPUs by
    writing to each other's memory. Mutable: `connect` must come before the first gather; a rank's share of a
    model can be described and loaded before."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._gloo: _Gatherer | None = None
        self._memory: RankMemory | None = None
        self._kept: tuple[object, ...] = ()  # torch frees these, and their memory, unless they are referenced

    def connect(self, folder: Path, device: torch.device) -> None:
        """Waits until all ranks are connected. folder: an empty folder where they find each other, which is
        not needed later. device: that of this rank; a GPU must be the current one. Raises RankError."""
        # torch's type stubs export neither the options nor the store.
        options = vars(ProcessGroupGloo)["_Options"]()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=WAIT_SECONDS)
        make = cast("Callable[..., _Gatherer]", ProcessGroupGloo)
        try:
            store = vars(torch.distributed)["FileStore"](str(folder / "ranks"), self.size)
            self._gloo = make(store, self.rank, self.size, options)
            if device.type == "cuda":
                self._memory = self._shared_memory(store, folder.name, device)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} found not all others: {error}") from error
        self.largest(0)  # the others have connected, too

    def _shared_memory(self, store: Store, name: str, device: torch.device) -> RankMemory:
        """name: the group's name in torch. Raises RuntimeError where the GPUs cannot write to each other's
        memory."""
        register = cast("Callable[[str, TorchGroup], None]", _register_process_group)  # torch 2.11 has str
        group = TorchGroup(store, self.rank, self.size)
        register(name, group)
        num_bytes = RankMemory.bytes_of(self.size, PART_BYTES)
        own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        own.zero_()
        torch.cuda.synchronize(device)
        met = _SymmetricMemory.rendezvous(own, name)
        self._kept = (group, own, met)
        memories = tuple(met.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size))
        return RankMemory.of(memories, self.rank, PART_BYTES)

    def largest(self, number: int) -> int:
        """Returns the largest of the ranks' numbers. Raises RankError."""
        return int(self.gather(torch.tensor([[number]])).amax())

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, n], of this rank, of any dtype. Returns [tokens, size * n]: those of all ranks, in
        their order. Raises RankError on CPUs."""
        if x.is_cuda:
            assert self._memory is not None, "the ranks are connected"
            return gather_ranks(x, self._memory)
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
