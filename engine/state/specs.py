"""Declares the state that a layer or a drafter keeps between steps. Each declares its own, so that no other
module knows its shape.

The same idea as vLLM's KVCacheSpec family (FullAttentionSpec, MLAAttentionSpec, MambaSpec), without its
groups and page padding: all paged and per-block state shares one space of block ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """One entry for each token of a block, such as keys and values. shape: the shape of one token's entry."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of a block of block_size tokens."""
        return block_size * _entry_bytes(self)

    def num_elements(self, block_size: int) -> int:
        """Returns the number of elements of a block."""
        return block_size * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One entry for each block. A further entry at the end belongs to no block: kernels write there what is
    not stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of a block, whatever its size."""
        return _entry_bytes(self)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One entry for each row of the table, addressed by `RowTensors.state_ids`: compaction never moves it.

    When a request gets the row, the entry is zeroed or copied from a checkpoint. is_scratch: neither is done,
    since the same request writes the entry before it reads it; checkpoints do not include it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_scratch: bool = False

    def block_bytes(self, block_size: int) -> int:
        """Returns 0, because blocks do not hold it."""
        return 0

    def row_bytes(self) -> int:
        """Returns the bytes of a row."""
        return _entry_bytes(self)


StateSpec = PagedSpec | BlockSpec | RowSpec
LayerState = Mapping[str, torch.Tensor]  # a layer's tensors by the names of its specs


def block_bytes(layers: Iterable[tuple[StateSpec, ...]], block_size: int) -> int:
    """Returns the bytes of one block over all these layers."""
    return sum(spec.block_bytes(block_size) for specs in layers for spec in specs)


def row_bytes(layers: Iterable[tuple[StateSpec, ...]]) -> int:
    """Returns the bytes of one row over all these layers without scratch, which is also the size of a
    checkpoint."""
    return _bytes_of_rows(layers, is_scratch=False)


def scratch_bytes(layers: Iterable[tuple[StateSpec, ...]]) -> int:
    """Returns the bytes of one row's scratch over all these layers."""
    return _bytes_of_rows(layers, is_scratch=True)


def _bytes_of_rows(layers: Iterable[tuple[StateSpec, ...]], *, is_scratch: bool) -> int:
    kept = (spec for specs in layers for spec in specs if isinstance(spec, RowSpec))
    return sum(spec.row_bytes() for spec in kept if spec.is_scratch == is_scratch)


def _entry_bytes(spec: StateSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
