"""Loads a model folder in Hugging Face layout, or draws weights of its shape.

Tensors are streamed one by one into the parameters, so that no second copy of the model exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.linear import Kind
from headway.engine.layers.model_pair import MakeDraft, ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.files import DTYPES, Header
from headway.engine.loading.formats import LM_HEAD
from headway.engine.loading.headers import (
    EMBEDDING,
    Checkpoint,
    DtypeName,
    check_memory,
    checked_outline,
    dummy_dtype,
    headers_of,
    open_checkpoint,
    outline_of,
    shortened,
)
from headway.engine.loading.placing import by_memory, keeps_codes, most_saved_bytes, place_weights
from headway.engine.loading.quantizing import quantized_packs
from headway.engine.loading.sharing import shared
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import FULL, CpuWeights, Quantize
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import available_bytes, is_out_of_memory, return_freed_memory
from headway.kernels import DenseWeight

DUMMY_STANDARD_DEVIATION = 0.02
DRAWN_AT_ONCE = 1 << 22  # values for each seed, or one row
PLAIN_NORM = "delta.output_norm"  # multiplies by its weight where other norms multiply by 1 + weight
ROWS_AT_ONCE = 4096
BYTES_AT_ONCE = 256 << 20  # copied at a time, or one row: the experts of a layer may take a gigabyte

logger = logging.getLogger(__name__)


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    make_draft: MakeDraft | None,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
    group: Group = ALONE,
    quantize: Quantize = FULL,
    cpu_weights: CpuWeights = "full",
) -> ModelPair:
    """Loads a model folder. Raises ModelError.

    make_draft: makes the draft model that is also loaded, unless the folder lacks it; None: there is none.
    dtype: "auto" is float32 on the CPU and the checkpoint's own elsewhere. progress: called with the loaded
    fraction after each tensor. max_model_len: the served positions, which replace those of the spec; None for
    all that the model was made for. group: the ranks, of which this one's share is loaded. quantize: the
    format to which linear weights are quantised as they are read. cpu_weights: see EngineConfig.
    """
    with ExitStack() as stack:
        found = open_checkpoint(
            Path(path), stack, device=device, dtype=dtype, make_draft=make_draft, max_model_len=max_model_len
        )
        found = replace(found, spec=_with_true_ties(found))
        whole = checked_outline(found)
        return _filled(
            whole, headers_of(found, whole.tensors()), found.folder, device,
            group=group, quantize=quantize, cpu_weights=cpu_weights, progress=progress,
        )  # fmt: skip


def make_dummy_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    make_draft: MakeDraft | None,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
    group: Group = ALONE,
    quantize: Quantize = FULL,
    cpu_weights: CpuWeights = "full",
) -> ModelPair:
    """Makes a model of the shape that config.json describes, with random weights, for measurements. Raises
    ModelError.

    The folder needs no weights. They are drawn on the device, the same at each start and on any number of
    ranks; with a standard deviation of 0.02 and norm weights of 1, as models are initialised, no activation
    leaves bfloat16's range. dtype "auto" is float32 on the CPU and bfloat16 elsewhere. The other arguments:
    as for `load_model`.
    """
    folder = Path(path)
    spec = shortened(read_model_spec(folder), max_model_len)
    whole = outline_of(spec, dummy_dtype(dtype, device), make_draft)
    headers = drawn_headers(whole.tensors(), device, unit_offset=spec.norm.unit_offset)
    return _filled(
        whole, headers, folder, device, group=group, quantize=quantize, cpu_weights=cpu_weights, progress=progress
    )  # fmt: skip


def _filled(
    whole: ModelPair,
    headers: Mapping[str, Header],
    folder: Path,
    device: torch.device,
    *,
    group: Group,
    quantize: Quantize,
    cpu_weights: CpuWeights,
    progress: Callable[[float], None],
) -> ModelPair:
    """Returns models on the device, or the rank's share of them, with the weights that the headers read.
    headers: those of all tensors of `whole` by path, in their shapes. Raises ModelError."""
    target, own = whole.target, whole.outline(group)
    quantized = quantized_packs(headers, whole, quantize, folder, device)
    headers = shared({**headers, **quantized}, own.tensors(), target.spec, group)
    place = Placement(device, target.dtype, group=group, defers_weights=True)
    saved = most_saved_bytes(headers.values()) if keeps_codes(place) else 0
    narrow = own.saved_by_integers(cpu_weights)
    check_memory(folder, own, available_bytes(device), device, saved_bytes=saved + narrow)
    if device.type == "cpu":
        return_freed_memory()
    models = whole.placed(place)
    try:
        done = place_weights(models, headers, place, progress)
        _fill(models, headers, cpu_weights, lambda share: progress(done + share * (1 - done)))
    except RuntimeError as error:
        if saved == 0 or not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the weights of {folder} do not fit into the memory of {device}: some of their codes are of a kind that no "
            "kernel reads, and are expanded; take a smaller model or a larger machine"
        ) from error
    return models


def _fill(
    models: ModelPair,
    headers: Mapping[str, Header],
    cpu_weights: CpuWeights,
    progress: Callable[[float], None],
) -> None:
    """Copies the parameters that have no values yet, and converts linear layers and experts to their final
    format as soon as each is read, so that a quantised model is never dense as a whole. Memory of a CPU is
    only used when it is first written."""
    waiting = by_memory(models.tensors())
    total, done = sum(tensor.nbytes for own in waiting.values() for tensor in own.values()), 0

    def copy(parameters: Mapping[str, torch.Tensor]) -> None:
        nonlocal done
        before, own = done, sum(tensor.nbytes for tensor in parameters.values())
        copy_tensors(headers, parameters, lambda share: progress((before + share * own) / total))
        done += own

    dense = {id(linear.weight) for linear in models.linears() if isinstance(linear.stored, DenseWeight)}
    dense |= {id(matrix.dense) for experts in models.experts() for matrix in experts.weights}
    for key in [key for key in waiting if key not in dense]:
        copy(waiting.pop(key))
    tried: dict[Kind, int | None] = {}
    for linear in models.linears():
        if isinstance(linear.stored, DenseWeight):
            copy(waiting.pop(id(linear.weight), {}))  # a tied lm_head has no parameters of its own
        linear.finish(tried, cpu_weights)
    for experts in models.experts():
        for key in [id(matrix.dense) for matrix in experts.weights]:
            copy(waiting.pop(key, {}))
        experts.finish(cpu_weights)
    assert not waiting, f"nothing copied {[*waiting.values()]}"


def _with_true_ties(found: Checkpoint) -> ModelSpec:
    """Returns the spec, untied if the two tensors differ, whatever config.json says. transformers decides
    likewise."""
    spec, stored = found.spec, found.stored
    embedding, lm_head = found.names.of(EMBEDDING), found.names.of(LM_HEAD)
    if not spec.tied or not {embedding, lm_head} <= stored.keys():
        return spec
    if _are_equal(stored[embedding].get_slice(embedding), stored[lm_head].get_slice(lm_head), found.dtype):
        return spec
    logger.warning(
        "%s: config.json has tie_word_embeddings true, but the weights hold an %s that differs from %s; it is "
        "used (as by transformers). Set tie_word_embeddings to false to silence this line",
        found.folder, lm_head, embedding,
    )  # fmt: skip
    return replace(spec, tied=False)


def _are_equal(first: Header, second: Header, dtype: torch.dtype) -> bool:
    """Returns whether both have equal values in this dtype. Reads some rows at a time."""
    if first.get_shape() != second.get_shape():
        return False
    starts = range(0, first.get_shape()[0], ROWS_AT_ONCE) if first.get_shape() else ()
    places = (slice(start, start + ROWS_AT_ONCE) for start in starts)
    pairs = ((header[rows].to("cpu", dtype) for header in (first, second)) for rows in places)
    return all(torch.equal(one, other) for one, other in pairs)


def copy_tensors(
    headers: Mapping[str, Header], parameters: Mapping[str, torch.Tensor], progress: Callable[[float], None]
) -> None:
    """Copies the tensors that the headers read to the parameters. headers: by the paths of the parameters, in
    their shapes."""
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for path, parameter in parameters.items():
        first = 0
        for part in torch.split(parameter, max(BYTES_AT_ONCE // parameter[0].nbytes, 1)):
            part.copy_(headers[path][first : first + len(part)])
            first += len(part)
            done += part.nbytes
            progress(done / total)


class Drawn:
    """The Header of a tensor of random values. Any rows can be read alone, since each block of rows has a
    seed of its own."""

    def __init__(
        self, path: str, like: torch.Tensor, device: torch.device, mean: float, spread: float
    ) -> None:
        """path: determines the values. like: a tensor of the same shape and dtype, which may have no
        memory."""
        self._like, self._device, self._mean, self._spread = like, device, mean, spread
        self._path = path
        self._block_rows = max(DRAWN_AT_ONCE // max(like[0].numel(), 1), 1)

    def get_shape(self) -> list[int]:
        return list(self._like.shape)

    def get_dtype(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self._like.dtype)

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        rows, columns = places if isinstance(places, tuple) else (places, slice(None))
        first, last, _ = rows.indices(len(self._like))
        size = self._block_rows
        blocks = [
            self._block(start)[max(first - start, 0) : last - start]
            for start in range(first // size * size, last, size)
        ]
        return torch.cat(blocks)[:, columns] if isinstance(places, tuple) else torch.cat(blocks)

    def _block(self, start: int) -> torch.Tensor:
        shape = min(self._block_rows, len(self._like) - start), *self._like.shape[1:]
        seed = crc32(f"{self._path}:{start}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.empty(shape, dtype=self._like.dtype, device=self._device)
        return drawn.normal_(self._mean, self._spread, generator=generator)


def drawn_headers(
    parameters: Mapping[str, torch.Tensor], device: torch.device, *, unit_offset: bool
) -> dict[str, Header]:
    """Returns headers of random values by path. parameters: they may have no memory. unit_offset: norms
    multiply by 1 + weight."""
    found: dict[str, Header] = {}
    for path, tensor in parameters.items():
        is_norm = path.endswith("norm")
        is_offset = unit_offset and not path.endswith(PLAIN_NORM)
        mean = 1.0 if is_norm and not is_offset else 0.0
        found[path] = Drawn(path, tensor, device, mean, 0.0 if is_norm else DUMMY_STANDARD_DEVIATION)
    return found
