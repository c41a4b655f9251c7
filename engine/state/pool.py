"""The memory of the state that layers and the drafter keep between steps, at fixed addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from headway.engine.state.specs import BlockSpec, LayerState, PagedSpec, RowSpec, StateSpec, block_bytes
from headway.kernels import copy_entries

NUM_SPARE_ENTRIES = 2  # of row state: zeros, and an entry that belongs to no row


class StatePool:
    """Holds the state that specs declare. Layers and the drafter write to the tensors; the pool itself only
    zeros blocks, and copies the state of rows to checkpoints and back.

    The shape of a tensor by its spec:
        PagedSpec   [num_blocks, block_size, *shape]
        BlockSpec   [num_blocks + 1, *shape]; the last entry belongs to no block
        RowSpec     [num_rows + num_checkpoints + 2, *shape]: by state id, then by checkpoint; the entry
                    before the last is zero, the last belongs to no row; scratch: [num_rows, *shape]
    Layers with equal specs share one allocation, in which each has a part of its own.
    """

    def __init__(
        self,
        layers: Sequence[tuple[StateSpec, ...]],  # by layer of the target
        drafter: tuple[StateSpec, ...] = (),
        *,
        draft_layers: Sequence[tuple[StateSpec, ...]] = (),  # by layer of the draft model
        num_blocks: int,
        num_rows: int = 0,
        num_checkpoints: int = 0,
        block_size: int,
        device: torch.device,
        is_tried: bool = False,
    ) -> None:
        """is_tried: the pool is for steps that neither read nor write blocks. The paged state of all layers
        then shares one layer's memory, so that it is small."""
        self.num_blocks = num_blocks
        self.num_rows = num_rows
        self.num_checkpoints = num_checkpoints
        self.block_size = block_size
        self._device = device
        self._layers = tuple(layers)
        self._specs = (*layers, *draft_layers, drafter)
        counts = Counter(spec for specs in self._specs for spec in specs)
        self._memory: dict[StateSpec, torch.Tensor] = {}
        for spec, count in counts.items():
            num_taken = 1 if is_tried and isinstance(spec, PagedSpec) else count
            memory = torch.zeros((num_taken, *self._entries(spec)), dtype=spec.dtype, device=device)
            self._memory[spec] = memory.expand(count, *memory.shape[1:])
        parts = {spec: iter(memory.unbind()) for spec, memory in self._memory.items()}
        self._states: list[LayerState] = [
            {spec.name: next(parts[spec]) for spec in specs} for specs in self._specs
        ]

    def layer(self, index: int) -> LayerState:
        """Returns the tensors of one layer of the target by name."""
        return self._states[: len(self._layers)][index]

    def draft_layer(self, index: int) -> LayerState:
        """Returns the tensors of one layer of the draft model by name."""
        return self._states[len(self._layers) : -1][index]

    def kinds(self) -> list[tuple[int, LayerState]]:
        """Returns, for each kind of the target's layers (those with equal specs), the index of the first
        layer and the tensors of all, [layers, ...] by name."""
        firsts: dict[tuple[StateSpec, ...], int] = {}
        for index, specs in enumerate(self._layers):
            firsts.setdefault(specs, index)
        of_rows = [spec for specs in firsts for spec in specs if isinstance(spec, RowSpec)]
        assert len(of_rows) == len(set(of_rows)), "layers of different kinds have state of rows in common"
        return [(index, {spec.name: self._memory[spec] for spec in specs}) for specs, index in firsts.items()]

    @property
    def drafter(self) -> LayerState:
        """The tensors of the drafter by name."""
        return self._states[-1]

    def block_bytes(self) -> int:
        """Returns the bytes that one block takes in all layers."""
        return block_bytes(self._specs, self.block_size)

    def by_block(self) -> list[torch.Tensor]:
        """Returns all tensors of paged and per-block state, [num_blocks, ...] each."""
        return [
            part[: self.num_blocks]
            for spec, memory in self._memory.items()
            if not isinstance(spec, RowSpec)
            for part in memory.unbind()
        ]

    def wipe(
        self,
        block_ids: torch.Tensor,  # [n] int64
    ) -> None:
        """Zeros the contents of these blocks."""
        for tensor in self.by_block():
            tensor.index_fill_(0, block_ids, 0)

    @property
    def has_row_state(self) -> bool:
        """Returns whether a layer or the drafter keeps state by row that checkpoints hold."""
        return bool(self._memory_of_rows())

    def start_rows(
        self,
        state_ids: torch.Tensor,  # [n] int64
        checkpoints: torch.Tensor,  # [n] int64; -1: none, the state begins with zeros
    ) -> None:
        """Sets the initial state of rows."""
        entries = torch.where(checkpoints < 0, self.num_checkpoints, checkpoints) + self.num_rows
        self._copy_rows(entries, state_ids)

    def warm_up(self) -> None:
        """Compiles the kernel that copies the state of rows, by a copy to the entry that belongs to no
        row."""
        if self.has_row_state:
            first = self.num_rows + self.num_checkpoints
            spare = torch.arange(first, first + NUM_SPARE_ENTRIES, device=self._device)
            sources, targets = spare[:1], spare[1:]
            self._copy_rows(sources, targets)

    def save_rows(
        self,
        state_ids: torch.Tensor,  # [n] int64
        checkpoints: torch.Tensor,  # [n] int64
    ) -> None:
        """Copies the state of rows to checkpoints."""
        self._copy_rows(state_ids, checkpoints + self.num_rows)

    def _copy_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for memory in self._memory_of_rows():
            copy_entries(memory, sources, targets)

    def _memory_of_rows(self) -> list[torch.Tensor]:
        """Returns the tensors that checkpoints cover, [layers, entries, ...] each."""
        kept = self._memory.items()
        return [memory for spec, memory in kept if isinstance(spec, RowSpec) and not spec.is_scratch]

    def ended_blocks(
        self,
        slot_mapping: torch.Tensor,  # [n] int64: block id * block size + offset; -1: not in the cache
    ) -> torch.Tensor:
        """Returns [n] int64: the block that each slot ends; for other slots the last entry of a BlockSpec,
        which belongs to no block."""
        ends_block = slot_mapping % self.block_size == self.block_size - 1
        # -1 // size is -1, which is the last entry, too.
        return torch.where(ends_block, slot_mapping // self.block_size, self.num_blocks)

    def _entries(self, spec: StateSpec) -> tuple[int, ...]:
        if isinstance(spec, BlockSpec):
            return self.num_blocks + 1, *spec.shape
        if isinstance(spec, RowSpec):
            num_others = 0 if spec.is_scratch else self.num_checkpoints + NUM_SPARE_ENTRIES
            return self.num_rows + num_others, *spec.shape
        return self.num_blocks, self.block_size, *spec.shape
