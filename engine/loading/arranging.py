"""Presents the tensors of a checkpoint in the engine's layout: the experts of a layer, which may be stored
one by one, as one tensor, and rows that are stored in groups with those of other tensors in their own order.

The result is a Reader of other readers. It reads a part when it is requested, so that no second copy of the
model exists.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from headway.engine.loading.files import Header, OneTensor, Reader
from headway.engine.models.family import RowGroups, WeightNames


class Stored(NamedTuple):
    """A stored tensor and the shape that it must have."""

    name: str
    header: Header
    shape: list[int]


class Arranged(OneTensor):
    """A tensor that is made of stored ones."""

    @abstractmethod
    def stored(self, shape: Sequence[int]) -> list[Stored]:
        """Returns the tensors that it is made of. shape: the shape that it must have itself."""


class StackedExperts(Arranged):
    """The tensors of all experts as one, [experts, rows, columns]. The rows of an expert are those of its
    tensors, one after the other."""

    def __init__(self, name: str, experts: Sequence[Mapping[str, Reader]]) -> None:
        """experts: for each expert the readers of its tensors by name."""
        super().__init__(name)
        self.experts = experts

    def stored(self, shape: Sequence[int]) -> list[Stored]:
        return [
            Stored(name, reader.get_slice(name), [shape[1] // len(parts), shape[2]])
            for parts in self.experts
            for name, reader in parts.items()
        ]

    def get_shape(self) -> list[int]:
        shapes = [reader.get_slice(name).get_shape() for name, reader in self.experts[0].items()]
        return [len(self.experts), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def get_dtype(self) -> str:
        name, reader = next(iter(self.experts[0].items()))
        return reader.get_slice(name).get_dtype()

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        assert isinstance(places, slice), "experts are read whole"
        return torch.stack([
            torch.cat([reader.get_tensor(name) for name, reader in parts.items()])
            for parts in self.experts[places]
        ])  # fmt: skip


class RegroupedRows(Arranged):
    """Rows that are taken from the groups of rows of another tensor, [rows, columns]."""

    def __init__(self, name: str, source: str, reader: Reader, groups: RowGroups) -> None:
        super().__init__(name)
        self._source, self._reader, self._groups = source, reader, groups

    def stored(self, shape: Sequence[int]) -> list[Stored]:
        rows = self._groups.num_groups * self._groups.group_size
        return [Stored(self._source, self._reader.get_slice(self._source), [rows, *shape[1:]])]

    def get_shape(self) -> list[int]:
        rows = self._groups.num_groups * sum(count for _, count in self._groups.spans)
        return [rows, *self._reader.get_slice(self._source).get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._reader.get_slice(self._source).get_dtype()

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        rows = self._reader.get_tensor(self._source)
        groups = rows.view(self._groups.num_groups, self._groups.group_size, -1)
        parts = [groups[:, first : first + count].flatten(0, 1) for first, count in self._groups.spans]
        return torch.cat(parts)[places]


def arranged(stored: Mapping[str, Reader], names: WeightNames) -> dict[str, Reader]:
    """Returns the stored tensors by the engine's names for them. If experts of a layer are missing, the
    others stay as they are stored."""
    result = dict(stored)
    for end, parts in () if names.experts is None else names.experts.parts.items():
        first = parts[0].format(0)
        for start in [name.removesuffix(first) for name in stored if name.endswith(first)]:
            experts = names_of_experts(start + end, names)
            if all(name in stored for own in experts for name in own):
                readers = [{name: stored[name] for name in own} for own in experts]
                for own in readers:
                    for name in own:
                        del result[name]
                result[start + end] = StackedExperts(start + end, readers)
    for end, groups in names.regrouped.items():
        for source in [name for name in stored if name.endswith(groups.source)]:
            name = source.removesuffix(groups.source) + end
            result[name] = RegroupedRows(name, source, stored[source], groups)
            result.pop(source, None)
    return result


def missing_of(name: str, stored: Mapping[str, Reader], names: WeightNames) -> list[str]:
    """Returns the stored names that a tensor lacks: the missing parts of experts that are stored one by one,
    or its own name."""
    parts = _parts_of(name, names)
    lacking = [part for part in parts if part not in stored]
    is_in_groups = any(name.endswith(end) for end in names.regrouped)
    return lacking if is_in_groups or len(lacking) < len(parts) else [name]


def stored_twice(wanted: Iterable[str], stored: Mapping[str, Reader], names: WeightNames) -> list[str]:
    """Returns the names of wanted tensors that are stored both as one and as the parts that they can be made
    of."""
    return [
        name for name in wanted if name in stored and any(part in stored for part in _parts_of(name, names))
    ]


def _parts_of(name: str, names: WeightNames) -> list[str]:
    """Returns the names of the stored tensors that a tensor can be made of; none for other tensors."""
    for end, groups in names.regrouped.items():
        if name.endswith(end):
            return [name.removesuffix(end) + groups.source]
    return [part for own in names_of_experts(name, names) for part in own]


def names_of_experts(name: str, names: WeightNames) -> list[list[str]]:
    """Returns for each expert the names of the tensors that a packed one stands for; none for other
    tensors."""
    if names.experts is None:
        return []
    for end, parts in names.experts.parts.items():
        if name.endswith(end):
            start = name.removesuffix(end)
            return [
                [start + part.format(index) for part in parts] for index in range(names.experts.num_experts)
            ]
    return []
