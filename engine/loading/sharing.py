"""Presents one rank's share of the tensors of a model. Each rank reads only its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headway.engine.layers.group import Group
from headway.engine.loading.arranging import StackedExperts
from headway.engine.loading.files import Header, OneTensor, Reader, Span, spans_within
from headway.engine.loading.packs import Pack
from headway.engine.models.spec import DeltaNetSpec, ModelSpec


def shared(
    headers: Mapping[str, Header], own: Mapping[str, torch.Tensor], spec: ModelSpec, group: Group
) -> dict[str, Header]:
    """Returns the rank's share of each tensor, by path. headers: those of whole tensors. own: the rank's
    parameters, whose shapes say which ones are shared."""
    found = dict(headers)
    for path, tensor in own.items():
        whole, shape = headers[path].get_shape(), list(tensor.shape)
        if whole == shape:
            continue
        dim = next(dim for dim, count in enumerate(whole) if count != shape[dim])
        parts = _parts_of(path, whole[dim], spec)
        spans = spans_of(parts, whole[dim] // shape[dim], group)
        found[path] = _share_of(path, headers[path], dim, spans)
    return found


def spans_of(parts: Sequence[int], num_shares: int, group: Group) -> list[Span]:
    """Returns the rank's rows of each of the parts, which have equal shares.

    num_shares: the number of ranks, or a divisor of it, so that neighbouring ranks have the same share: ranks
    0 and 1 of 4 have the first of 2 shares.
    """
    index, spans, first = group.rank * num_shares // group.size, [], 0
    for count in parts:
        spans.append((first + index * (count // num_shares), count // num_shares))
        first += count
    return spans


def _parts_of(path: str, rows: int, spec: ModelSpec) -> tuple[int, ...]:
    """Returns the numbers of rows of successive parts of a tensor, each of which the ranks share
    separately."""
    if path.endswith(".experts.gate_up"):
        return rows // 2, rows // 2
    if path.endswith((".delta.qkv.weight", ".delta.convolution")):
        mixer = spec.layers[int(path.split(".")[1])].mixer
        assert isinstance(mixer, DeltaNetSpec), path
        keys = mixer.num_key_heads * mixer.key_dim
        return keys, keys, rows - 2 * keys
    return (rows,)


def _share_of(name: str, tensor: Header, dim: int, spans: Sequence[Span]) -> Header:
    """Returns the share of one tensor. dim: the shared dimension; 1 for stacked matrices."""
    if isinstance(tensor, Pack):
        return tensor.of_rows(spans)
    if isinstance(tensor, StackedExperts):
        return StackedExperts(name, [_share_of_expert(parts, spans) for parts in tensor.experts])
    return _Share(name, tensor, dim, spans)


def _share_of_expert(parts: Mapping[str, Reader], spans: Sequence[Span]) -> dict[str, Reader]:
    """Returns the share of one expert. parts: its successive tensors. spans: the rows of all of them
    together."""
    found: dict[str, Reader] = {}
    first = 0
    for name, reader in parts.items():
        header = reader.get_slice(name)
        end = first + header.get_shape()[0]
        cut = [(max(start, first), min(start + count, end)) for start, count in spans]
        own = [(start - first, stop - start) for start, stop in cut if start < stop]
        found[name] = reader.of_rows(own) if isinstance(reader, Pack) else _Share(name, header, 0, own)
        first = end
    return found


class _Share(OneTensor):
    """Shows some rows of a tensor, or of each matrix of a stack."""

    def __init__(self, name: str, header: Header, dim: int, spans: Sequence[Span]) -> None:
        super().__init__(name)
        self._header, self._dim, self._spans = header, dim, spans

    def get_shape(self) -> list[int]:
        shape = list(self._header.get_shape())
        shape[self._dim] = sum(count for _, count in self._spans)
        return shape

    def get_dtype(self) -> str:
        return self._header.get_dtype()

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        assert isinstance(places, slice), "a rank reads its rows whole"
        if self._dim == 1:
            parts = [self._header[places, slice(first, first + count)] for first, count in self._spans]
        else:
            wanted = spans_within(self._spans, *places.indices(self.get_shape()[0])[:2])
            parts = [self._header[first : first + count] for first, count in wanted]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self._dim)
