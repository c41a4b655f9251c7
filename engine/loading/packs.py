"""Reads quantised weights of a model folder as the dense weights that they represent.

A value is its code, less the zero point if there is one, times its scale, in float32, rounded once to the
dtype that config.json names, as in an expanded checkpoint. The scales in the files say which tensors are
quantised; config.json is checked against them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from math import prod

import torch

from headway.engine.loading.files import DTYPES, OneTensor, Reader, Span, listed
from headway.engine.loading.layouts import EVERYTHING, PARTS, READERS, Coded, Codes, Part, SomeRows
from headway.engine.models.quantization import Layout, Quantization
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import format_bytes

VALUES_AT_ONCE = 1 << 24  # expanded at a time: 64 MiB of float32, whatever the weight's size
# Scales of a layer's inputs and outputs and of the KV cache, which are unused, since all of these keep 16
# bits.
UNUSED = frozenset({
    "input_scale", "activation_scale", "input_zero_point", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale",
    "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point", "output_zero_point",
})  # fmt: skip
logger = logging.getLogger(__name__)


def expanded(
    stored: Mapping[str, Reader],
    quantization: Quantization,
    device: torch.device,
    is_seldom_listed: Callable[[str], bool],
) -> dict[str, Reader]:
    """Returns the stored tensors with dense weights in place of quantised ones, which are expanded on the
    device as they are read. Raises ModelError, which names the tensor, for packs that are damaged or that
    contradict config.json.

    is_seldom_listed: whether a layer belongs to a draft head or to a vision tower, which config.json often
    fails to list.
    """
    layers: dict[str, dict[str, Part]] = defaultdict(dict)
    for name, reader in stored.items():
        layer, _, kind = name.rpartition(".")
        layers[layer][kind] = Part(name, reader)
    dense: dict[str, Reader] = {}
    packs: dict[str, Pack] = {}
    for layer, parts in layers.items():
        layout = _layout_of(layer, parts, quantization)
        used = UNUSED
        if layout is not None:
            used = UNUSED | PARTS[layout][0] | PARTS[layout][1]
            packs[layer] = Pack(layer, READERS[layout](layer, parts, quantization), quantization, device)
            dense[f"{layer}.weight"] = packs[layer]
        dense |= {part.name: part.reader for kind, part in parts.items() if kind not in used}
    if not packs:
        raise ModelError(
            f"config.json says that weights are quantized ({quantization.method}), but no tensor has a scale; "
            "take quantization_config out of it, or fetch the weights again"
        )
    _check_lists(packs.keys(), layers, quantization, is_seldom_listed)
    logger.info(
        "%d weights of %s stand for %s, %s if all are expanded",
        len(packs), quantization.method, " and ".join(sorted({pack.get_dtype() for pack in packs.values()})),
        format_bytes(sum(pack.nbytes for pack in packs.values())),
    )  # fmt: skip
    if quantization.has_cache_scheme:
        logger.info("the KV cache stays as it is: config.json's scheme and scales for it are not used")
    return dense


def num_expanded(stored: Mapping[str, Reader]) -> int:
    """Returns the number of tensors that are expanded as they are read."""
    return sum(isinstance(reader, Pack) for reader in stored.values())


class Pack(OneTensor):
    """A quantised weight that is read as a dense one."""

    def __init__(self, layer: str, codes: Codes, quantization: Quantization, device: torch.device) -> None:
        super().__init__(f"{layer}.weight")
        self._codes: Codes = codes
        self._device = device
        by_scale = {"F16": "float16"}.get(codes.scale_dtype, "bfloat16")
        name = quantization.dtype or by_scale
        self._dtype_name = {"float32": "F32", "float16": "F16", "float64": "F64"}.get(name, "BF16")

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the expanded weight."""
        return prod(self._codes.shape) * DTYPES[self._dtype_name].itemsize

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that the weight saves if its codes stay, with 4 bytes of scales for 128 of them;
        0 if they cannot stay."""
        bits = self._codes.code_bits if self._dtype_name == "BF16" else None
        count = prod(self._codes.shape)
        return 0 if bits is None else self.nbytes - count * bits // 8 - count // 32

    def coded(self) -> Coded | None:
        """Returns the weight as kernels read it; None if they cannot, or would round differently."""
        if self._dtype_name != "BF16":
            return None
        return self._codes.coded(0, self._codes.shape[0], self._device)

    def of_rows(self, spans: Sequence[Span]) -> Pack:
        """Returns these rows of the weight."""
        some = copy(self)
        some._codes = SomeRows(self._codes, spans)
        return some

    def get_shape(self) -> list[int]:
        return list(self._codes.shape)

    def get_dtype(self) -> str:
        return self._dtype_name

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        outputs, inputs = self._codes.shape
        rows, columns = places if isinstance(places, tuple) else (places, EVERYTHING)
        first, last, _ = rows.indices(outputs)
        dtype = DTYPES[self._dtype_name]
        result = torch.empty(last - first, inputs, dtype=dtype, device=self._device)
        step = max(VALUES_AT_ONCE // inputs, 1)
        for start in range(first, last, step):
            end = min(start + step, last)
            result[start - first : end - first] = self._codes.values(start, end, self._device)
        return result[:, columns]


def _layout_of(layer: str, parts: Mapping[str, Part], quantization: Quantization) -> Layout | None:
    """Returns the layout of a layer's quantised weight; None if it is not quantised. Raises ModelError."""
    kinds = parts.keys()
    is_coded = "weight" in kinds and parts["weight"].dtype not in DTYPES
    found: set[Layout] = set()
    if kinds & {"weight_packed", "weight_shape", "weight_g_idx"}:
        found.add("packed")
    if is_coded or (kinds & PARTS["scaled"][1] and not found):
        found.add("scaled")
    if kinds & {"qweight", "qzeros", "scales"}:
        found.add("awq" if "awq" in quantization.layouts else "gptq")
    if not found:
        return None
    if len(found) > 1 or (found != {"scaled"} and "weight" in kinds):
        raise ModelError(
            f"{layer} has its weight in two formats ({', '.join(sorted(kinds))}); fetch the weights again"
        )
    (layout,) = found
    name = f"{layer}.{min(kinds & (PARTS[layout][0] | PARTS[layout][1]))}"
    if layout not in quantization.layouts:
        raise ModelError(
            f"{name} is stored as {layout}, but config.json says {quantization.method} with "
            f"{' and '.join(sorted(quantization.layouts))} weights; check that config.json belongs to them"
        )
    must, may = PARTS[layout]
    if missing := sorted((must | (may & quantization.required)) - kinds):
        raise ModelError(
            f"{layer}.{missing[0]} is missing beside {', '.join(sorted(kinds))}; fetch the weights again"
        )
    return layout


def _check_lists(
    packs: Collection[str],
    layers: Mapping[str, Mapping[str, Part]],
    quantization: Quantization,
    is_seldom_listed: Callable[[str], bool],
) -> None:
    """Raises ModelError if config.json and the files contradict each other.

    A layer that is not quantised should be listed if others of its kind are quantised.
    """
    if quantized := [name for name in packs if quantization.keeps(name) and not is_seldom_listed(name)]:
        raise ModelError(
            f"config.json lists {len(quantized)} layers as not quantized that have scales: {listed(quantized)}; check "
            "that config.json belongs to these weights"
        )
    kinds = {name.rpartition(".")[2] for name in packs if not is_seldom_listed(name)}
    plain = [
        name
        for name, parts in layers.items()
        if "weight" in parts and name not in packs and name.rpartition(".")[2] in kinds
        and not is_seldom_listed(name) and not quantization.keeps(name)
    ]  # fmt: skip
    if plain and quantization.lists_all:
        raise ModelError(
            f"{len(plain)} weights have no scale though config.json does not list them as not quantized: {listed(plain)}; fetch the "
            "weights again"
        )
