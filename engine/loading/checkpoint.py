"""Loads a model folder in Hugging Face layout, or draws weights of its shape.

Tensors are streamed one by one into the parameters, so that no second copy of the model exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.linear import finish_linears
from headway.engine.layers.model_pair import MakeDraft, ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.arranging import StackedExperts
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
from headway.engine.loading.packs import Pack
from headway.engine.loading.placing import keeps_codes, most_saved_bytes, place_weights
from headway.engine.loading.quantizing import quantized_packs
from headway.engine.loading.sharing import shared
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import FULL, CpuWeights, Quantize
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import available_bytes, is_out_of_memory

DUMMY_SEED, DUMMY_STANDARD_DEVIATION = 0, 0.02
PLAIN_NORM = "delta.output_norm"  # multiplies by its weight where other norms multiply by 1 + weight
ROWS_AT_ONCE = 4096
BYTES_AT_ONCE = 256 << 20  # copied at a time, or one row: the experts of a layer are a gigabyte

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

    make_draft: makes the draft model that is loaded, too, unless the folder lacks it; None: none is.
    dtype "auto" is float32 on the CPU and the checkpoint's own elsewhere. progress: called with the fraction
    that is loaded, after each tensor. max_model_len: positions that are served, which the model's config then
    says; None for all that it was made for. group: its rank's share is loaded. quantize: how linear weights
    are quantised as they are read. cpu_weights: see EngineConfig.
    """
    with ExitStack() as stack:
        found = open_checkpoint(
            Path(path),
            stack,
            device=device,
            dtype=dtype,
            make_draft=make_draft,
            max_model_len=max_model_len,
        )
        found = replace(found, spec=_with_true_ties(found))
        whole = checked_outline(found)
        headers = headers_of(found, whole)
        headers |= quantized_packs(headers, whole, quantize, found.folder, device)
        own = outline_of(found.spec, found.dtype, found.make_draft, group=group)
        headers = shared(headers, own.tensors(), found.spec, group)
        place = Placement(device, found.dtype, group=group, defers_weights=True)
        saved = most_saved_bytes(headers.values()) if keeps_codes(place) else 0
        check_memory(found.folder, own, available_bytes(device), device, saved_bytes=saved)
        models = ModelPair(found.spec, place, found.make_draft)
        try:
            done = place_weights(models, headers, place, progress)
            copy_tensors(headers, models.tensors(), lambda share: progress(done + share * (1 - done)))
        except RuntimeError as error:
            if saved == 0 or not is_out_of_memory(error):
                raise
            raise ModelError(
                f"the weights of {found.folder} do not fit into the memory of {device}: some of their codes are of a kind that no "
                "kernel reads, and are expanded; take a smaller model or a larger machine"
            ) from error
    finish_linears(models.linears(), cpu_weights)
    return models


def make_dummy_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    make_draft: MakeDraft | None,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
    quantize: Quantize = FULL,
    cpu_weights: CpuWeights = "full",
) -> ModelPair:
    """A model of the shape that config.json describes, with random weights: for measurements. Raises
    ModelError.

    The folder needs no weights. They are drawn on the device, the same at each start; with a standard
    deviation of 0.02 and norm weights of 1, as models are initialised, no activation leaves bfloat16's range.
    dtype "auto" is float32 on the CPU and bfloat16 elsewhere. make_draft, max_model_len, quantize,
    cpu_weights: as for `load_model`.
    """
    folder = Path(path)
    spec = shortened(read_model_spec(folder), max_model_len)
    target = dummy_dtype(dtype, device)
    whole, generator = outline_of(spec, target, make_draft), torch.Generator(device).manual_seed(DUMMY_SEED)
    place = Placement(device, target, defers_weights=True)
    drawn = {path: Drawn(tensor.shape, target, generator) for path, tensor in whole.tensors().items()}
    packs = quantized_packs(drawn, whole, quantize, folder, device)
    saved = most_saved_bytes(packs.values()) if keeps_codes(place) else 0
    check_memory(folder, whole, available_bytes(device), device, saved_bytes=saved)
    models = ModelPair(spec, place, make_draft)
    done = place_weights(models, packs, place, progress)
    draw_tensors(
        models.tensors(),
        packs,
        generator,
        lambda share: progress(done + share * (1 - done)),
        unit_offset=spec.norm.unit_offset,
    )
    finish_linears(models.linears(), cpu_weights)
    return models


def _with_true_ties(found: Checkpoint) -> ModelSpec:
    """Two tensors that differ are not tied, whatever config.json says: as transformers decides it."""
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
    """Returns whether their values are, once they have this dtype. Reads some rows at a time."""
    if first.get_shape() != second.get_shape():
        return False
    starts = range(0, first.get_shape()[0], ROWS_AT_ONCE) if first.get_shape() else ()
    places = (slice(start, start + ROWS_AT_ONCE) for start in starts)
    pairs = ((header[rows].to("cpu", dtype) for header in (first, second)) for rows in places)
    return all(torch.equal(one, other) for one, other in pairs)


def copy_tensors(
    headers: Mapping[str, Header],
    parameters: Mapping[str, torch.Tensor],
    progress: Callable[[float], None],
) -> None:
    """headers: by the paths of the parameters, in their shapes."""
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for path, parameter in parameters.items():
        first = 0
        for part in torch.split(parameter, max(BYTES_AT_ONCE // parameter[0].nbytes, 1)):
            part.copy_(headers[path][first : first + len(part)])
            first += len(part)
            done += part.nbytes
            progress(done / total)


class Drawn:
    """The Header of a random weight."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> None:
        self._shape, self._dtype, self._generator = shape, dtype, generator

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self._dtype)

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor:
        assert isinstance(places, slice), "rows are drawn whole"
        count = len(range(*places.indices(self._shape[0])))
        drawn = torch.empty(count, *self._shape[1:], dtype=self._dtype, device=self._generator.device)
        return drawn.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=self._generator)


def draw_tensors(
    parameters: Mapping[str, torch.Tensor],
    packs: Mapping[str, Pack | StackedExperts],
    generator: torch.Generator,
    progress: Callable[[float], None],
    *,
    unit_offset: bool,
) -> None:
    """packs: what of the parameters is drawn, quantised and expanded. unit_offset: norms multiply by 1 +
    weight."""
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for path, parameter in parameters.items():
        if path.endswith("norm"):
            is_offset = unit_offset and not path.endswith(PLAIN_NORM)
            parameter.fill_(0.0 if is_offset else 1.0)
        elif path in packs:
            parameter.copy_(packs[path][:])
        else:
            parameter.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)
        done += parameter.nbytes
        progress(done / total)
