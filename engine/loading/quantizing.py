"""Quantises weights as they are read, by way of the tensors that `headway quantize` writes, so that they have
the same values as in the written folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading.arranging import StackedExperts
from headway.engine.loading.files import DTYPES, Header, OneTensor
from headway.engine.loading.formats import (
    BLOCK,
    FORMATS,
    GROUP,
    ROWS_AT_ONCE,
    Format,
    is_quantized_path,
    scheme_of,
)
from headway.engine.loading.layouts import READERS, Coded, Codes, Part, joined
from headway.engine.loading.packs import Pack
from headway.engine.loading.placing import by_memory
from headway.engine.models.quantization import Layout, Quantization, read_quantization
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import Quantize
from headway.engine.protocol.errors import ModelError

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.float64: "float64"}
_DTYPE_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64"} | {
    dtype: name for name, dtype in DTYPES.items()
}


def quantized_packs(
    headers: Mapping[str, Header], models: ModelPair, quantize: Quantize, folder: Path, device: torch.device
) -> dict[str, Pack | StackedExperts]:
    """Returns the quantised weights by path, which are read as dense ones. headers: those of the parameters,
    by path. folder: the folder of the model. Raises ModelError for a model whose weights cannot be quantised
    so."""
    if quantize.format == "none":
        return {}
    _check_quantize(quantize, folder, models.target.spec)
    own = FORMATS[quantize.format]
    scheme = read_quantization({"quantization_config": scheme_of(own, [])}, ModelError)
    assert scheme is not None, "the scheme is one that is read"

    def pack_of(path: str, header: Header) -> Pack:
        stored = _NAMES.get(DTYPES[header.get_dtype()], "bfloat16")
        named = replace(scheme, dtype=models.target.spec.named_dtype or stored)
        codes = _QuantizedOnReading(path, header, own, named)
        return Pack(path.removesuffix(".weight"), codes, named, device)

    linears, stacks = quantized_paths(models, own, with_lm_head=quantize.with_lm_head)
    packs: dict[str, Pack | StackedExperts] = {path: pack_of(path, headers[path]) for path in linears}
    for path, count in stacks.items():
        stack = [_parts_of_expert(path, headers[path], index) for index in range(count)]
        packs[path] = StackedExperts(
            path, [{part: pack_of(part, header) for part, header in parts.items()} for parts in stack]
        )
    if not packs:
        raise ModelError(
            f"no weight has inputs in whole groups of {GROUP}; take another --quantize than int4"
        )
    return packs


def quantized_paths(
    models: ModelPair, own: Format, *, with_lm_head: bool
) -> tuple[list[str], dict[str, int]]:
    """Returns the paths of the weights that are quantised: of linear layers and shared experts, then of the
    stacks of all other experts, each with the number of its experts. models: without memory."""
    parts = by_memory(models.tensors())
    weights = [id(linear.weight) for linear in models.linears()]
    weights += [id(matrix.dense) for experts in models.experts() for matrix in experts.weights]
    linears, stacks = [], {}
    # A tied lm_head has no parameters of its own.
    for path, tensor in (item for key in weights for item in parts.get(key, {}).items()):
        if not own.fits(tensor.shape[-2:]):
            continue
        if tensor.dim() == 3:
            stacks[path] = len(tensor)
        elif is_quantized_path(path, with_lm_head=with_lm_head):
            linears.append(path)
    return linears, stacks


def _check_quantize(quantize: Quantize, folder: Path, spec: ModelSpec) -> None:
    """Raises ModelError for a model whose weights are not to be quantised so."""
    if spec.quantization is not None:
        raise ModelError(
            f"--quantize is {quantize.format}, but the weights of {folder} are quantized already "
            f"({spec.quantization.method}); leave it out, or take the unquantized checkpoint"
        )
    if quantize.with_lm_head and spec.tied:
        raise ModelError(
            f"the lm_head of {folder} is its embedding, which stays as it is; leave out --quantize-lm-head"
        )


def _parts_of_expert(path: str, stack: Header, index: int) -> dict[str, Header]:
    """Returns the weights of one expert by paths of their own. Gate and up are quantised separately, as they
    are where experts are stored one by one."""
    count = 2 if path.endswith("gate_up") else 1
    rows = stack.get_shape()[1] // count
    parts = (slice(part * rows, (part + 1) * rows) for part in range(count))
    return {f"{path}.{index}.{part.start}": _PartOfStack(stack, index, part) for part in parts}


class _PartOfStack:
    """The Header of some rows of one expert's weight, [rows, in]."""

    def __init__(self, stack: Header, index: int, rows: slice) -> None:
        self._stack, self._index, self._rows = stack, index, rows

    def get_shape(self) -> list[int]:
        return [self._rows.stop - self._rows.start, *self._stack.get_shape()[2:]]

    def get_dtype(self) -> str:
        return self._stack.get_dtype()

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        return self._stack[self._index : self._index + 1][0][self._rows][places]


class _QuantizedOnReading:
    """The Codes of a dense weight."""

    def __init__(self, path: str, header: Header, own: Format, scheme: Quantization) -> None:
        self._path, self._header, self._own, self._scheme = path, header, own, scheme
        self.shape: tuple[int, int] = (header.get_shape()[0], header.get_shape()[1])
        self.scale_dtype = header.get_dtype()
        self.code_bits: int | None = own.code_bits

    def values(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        start = first // BLOCK * BLOCK
        end = min(-(-last // BLOCK) * BLOCK, self.shape[0])
        return self._codes(start, end, device).values(first - start, last - start, device)

    def coded(self, first: int, last: int, device: torch.device) -> Coded | None:
        pieces = []
        for start in range(first // BLOCK * BLOCK, last, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, -(-last // BLOCK) * BLOCK, self.shape[0])
            own = max(first - start, 0), min(last, end) - start
            pieces.append(self._codes(start, end, device).coded(*own, device))
        return joined(pieces)

    def _codes(self, first: int, last: int, device: torch.device) -> Codes:
        rows = self._header[first:last].to(device)
        parts = self._own.parts(rows.float() if rows.dtype == torch.float64 else rows)
        layer = self._path.removesuffix(".weight")
        layout: Layout = "scaled" if "weight" in parts else "packed"
        readers = {kind: Part(f"{layer}.{kind}", _InMemory(kind, part)) for kind, part in parts.items()}
        return READERS[layout](layer, readers, self._scheme)


class _InMemory(OneTensor):
    """A tensor that is in memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(name)
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _DTYPE_NAMES[self._tensor.dtype]

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        return self._tensor[places]
