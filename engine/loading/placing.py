"""Converts the weights of linear layers and of experts to their final formats: codes and scales if the
device's kernels read them, or else dense memory for a later copy."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.arranging import StackedExperts
from headway.engine.loading.files import Header, Reader
from headway.engine.loading.layouts import Coded
from headway.engine.loading.packs import Pack
from headway.engine.state.memory import format_bytes
from headway.kernels import (
    DenseWeight,
    ExpertMatrix,
    ExpertWeights,
    QuantizedWeight,
    pack_expert,
    quantized_weight,
    reads_codes,
)

logger = logging.getLogger(__name__)


def place_weights(
    models: ModelPair, headers: Mapping[str, Header], place: Placement, progress: Callable[[float], None]
) -> float:
    """Allocates the memory of all linear layers and experts with deferred weights. Returns the share of all
    weights that are complete: those of packs that kernels read.

    headers: those of weights by path, quantised ones included. progress: called with that share.
    """
    tensors = models.tensors()
    paths = defaultdict(list, {key: [*own] for key, own in by_memory(tensors).items()})
    total, done = sum(tensor.numel() for tensor in tensors.values()), 0
    for linear in models.linears():
        if not linear.weight.is_meta:
            continue
        weight = _coded(linear, [headers.get(path) for path in paths[id(linear.weight)]], place)
        if weight is None:
            linear.store(DenseWeight(torch.empty(linear.shape, device=place.device, dtype=place.dtype)))
        else:
            linear.store(weight)
            done += weight.num_coded * weight.shape[1]
            progress(done / total)
    for experts in models.experts():
        placed = []
        for matrix in experts.weights:
            dense = matrix.dense
            assert dense is not None, "nothing is loaded yet"
            coded = _coded_experts([headers.get(path) for path in paths[id(dense)]], place)
            if coded is None:
                coded = ExpertMatrix(torch.empty_like(dense, device=place.device))
            else:
                done += dense.numel()
                progress(done / total)
            placed.append(coded)
        experts.store(ExpertWeights(*placed))
    if any(map(_packs_of, headers.values())):
        _log_codes(models)
    return done / total


def by_memory(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Returns the tensors by path, grouped by the identity of the tensor whose memory they are parts of."""
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for path, tensor in tensors.items():
        found[id(tensor if tensor._base is None else tensor._base)][path] = tensor
    return found


def most_saved_bytes(headers: Iterable[Header | Reader]) -> int:
    """Returns the bytes that weights save if the codes of all quantised ones stay in memory, which only their
    scales can decide."""
    return sum(pack.saved_bytes for header in headers for pack in _packs_of(header))


def expanded_bytes(models: ModelPair, headers: Mapping[str, Header]) -> int:
    """Returns the bytes of expanded copies of all quantised linear layers whose codes may stay in memory."""
    return sum(
        linear.num_weights * torch.bfloat16.itemsize
        for linear in models.linears()
        if any(_packs_of(headers.get(path)) for path in linear.tensors())
    )


def _packs_of(header: Header | Reader | None) -> list[Pack]:
    if isinstance(header, StackedExperts):
        return [pack for own in header.experts for part in own.values() for pack in _packs_of(part)]
    return [header] if isinstance(header, Pack) else []


def _log_codes(models: ModelPair) -> None:
    linears = [linear for linear in models.linears() if linear.is_quantized]
    experts = [layer for layer in models.experts() if layer.is_quantized]
    num_bytes = sum(linear.nbytes for linear in linears) + sum(layer.nbytes for layer in experts)
    logger.info(
        "codes of %d linear layers and of the experts of %d layers stay in memory, %s; other quantized weights are expanded",
        len(linears), len(experts), format_bytes(num_bytes),
    )  # fmt: skip


def _coded(linear: Linear, parts: Sequence[Header | None], place: Placement) -> QuantizedWeight | None:
    """Returns the layer's weight as codes; None unless its first parts are all quantised in one way that
    kernels read. Later parts get dense memory; a gate must not have any."""
    num_coded = next((index for index, part in enumerate(parts) if not isinstance(part, Pack)), len(parts))
    others = sum(linear.output_counts[num_coded:]) if num_coded < len(parts) else 0
    coded = _codes_of(parts[:num_coded]) if keeps_codes(place) and num_coded > 0 else None
    if coded is None or (others > 0 and linear.is_gate):
        return None
    scales = torch.cat([part.scales for part in coded])
    narrow = scales.bfloat16()
    found = quantized_weight(
        torch.cat([part.codes for part in coded]),
        narrow if torch.equal(narrow.float(), scales) else scales,
        torch.cat([part.zeros for part in coded]),
        bits=coded[0].bits,
        is_paired=linear.is_gate,
    )
    if found is None or others == 0:
        return found
    return found._replace(rest=torch.empty(others, linear.shape[1], device=place.device, dtype=place.dtype))


def _coded_experts(headers: Sequence[Header | None], place: Placement) -> ExpertMatrix | None:
    """Returns a matrix of experts as codes; None unless all are quantised in one way that kernels read.
    headers: that of the experts, then those of the parts of the shared one."""
    experts, *shared = headers
    if not keeps_codes(place) or not isinstance(experts, StackedExperts):
        return None
    parts: list[Sequence[Header | Reader | None]] = [[*own.values()] for own in experts.experts]
    if shared:
        parts.append(shared)
    values, factors, bits = torch.empty(0), torch.empty(0), 0
    for index, own in enumerate(parts):
        coded = _codes_of(own)
        if coded is None or bits not in (0, coded[0].bits):
            return None
        bits = coded[0].bits
        zeros = torch.cat([part.zeros for part in coded]) if bits == 4 else None
        codes, scales = (torch.cat(parts) for parts in zip(*[part[1:3] for part in coded], strict=True))
        packed = pack_expert(codes, scales, zeros, bits=bits)
        if packed is None:
            return None
        if index == 0:
            values, factors = (part.new_empty(len(parts), *part.shape) for part in packed)
        values[index], factors[index] = packed
    return ExpertMatrix(values, factors, bits)


def keeps_codes(place: Placement) -> bool:
    """Returns whether quantised weights can stay codes there."""
    return reads_codes(place.device) and place.dtype == torch.bfloat16


def _codes_of(parts: Sequence[Header | Reader | None]) -> list[Coded] | None:
    """Returns the codes of the parts of a weight; None unless all are quantised in one way."""
    found = [part.coded() if isinstance(part, Pack) else None for part in parts]
    coded = [part for part in found if part is not None]
    kinds = {(part.bits, part.scales.shape[1]) for part in coded}
    return coded if len(coded) == len(found) and len(kinds) == 1 else None
