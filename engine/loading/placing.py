"""Brings the weights of linear layers into the formats in which they stay: codes and scales where the
device's kernels read them, else dense, to be copied."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from headway.engine.layers.linear import Linear
from headway.engine.layers.model_pair import ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.packs import Pack
from headway.engine.state.memory import format_bytes
from headway.kernels import DenseWeight, QuantizedWeight, quantized_weight, reads_codes

logger = logging.getLogger(__name__)


def place_weights(
    models: ModelPair, packs: Mapping[str, Pack], place: Placement, progress: Callable[[float], None]
) -> float:
    """Gives every linear layer of deferred weights its memory. Returns the share of all weights that are in
    their places: those of packs that kernels read.

    packs: the quantised weights by their paths. progress: called with that share.
    """
    paths: dict[int, list[str]] = defaultdict(list)
    tensors = models.tensors()
    for path, tensor in tensors.items():
        paths[id(tensor if tensor._base is None else tensor._base)].append(path)
    total, done = sum(tensor.numel() for tensor in tensors.values()), 0
    for linear in models.linears():
        if not linear.weight.is_meta:
            continue
        own = [packs.get(path) for path in paths[id(linear.weight)]]
        weight = _coded(linear, own, place)
        if weight is None:
            linear.store(DenseWeight(torch.empty(linear.shape, device=place.device, dtype=place.dtype)))
        else:
            linear.store(weight)
            done += linear.num_weights
            progress(done / total)
    coded = [linear for linear in models.linears() if linear.is_quantized]
    if packs:
        logger.info(
            "codes of %d linear layers stay in memory, %s; other quantized weights are expanded",
            len(coded),
            format_bytes(sum(linear.nbytes for linear in coded)),
        )
    return done / total


def _coded(linear: Linear, packs: list[Pack | None], place: Placement) -> QuantizedWeight | None:
    """Returns None where the layer's parts are not all quantised in one way that kernels read."""
    is_read = reads_codes(place.device) and place.dtype == torch.bfloat16 and place.group.size == 1
    parts = [None if pack is None or not is_read else pack.coded() for pack in packs]
    coded = [part for part in parts if part is not None]
    if len(coded) < len(parts) or len({(part.bits, part.scales.shape[1]) for part in coded}) != 1:
        return None
    scales = torch.cat([part.scales for part in coded])
    narrow = scales.bfloat16()
    return quantized_weight(
        torch.cat([part.codes for part in coded]),
        narrow if torch.equal(narrow.float(), scales) else scales,
        torch.cat([part.zeros for part in coded]),
        bits=coded[0].bits,
        is_paired=linear.is_gate,
    )
