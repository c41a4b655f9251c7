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
from headway.engine.loading.files import Header, Reader
from headway.engine.loading.headers import (
    EMBEDDING,
    LM_HEAD,
    Checkpoint,
    DtypeName,
    by_name,
    check_memory,
    checked_outline,
    dummy_dtype,
    open_checkpoint,
    outline_of,
    shortened,
)
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.state.memory import available_bytes

DUMMY_SEED, DUMMY_STANDARD_DEVIATION = 0, 0.02
PLAIN_NORM = "delta.output_norm"  # multiplies by its weight where other norms multiply by 1 + weight
ROWS_AT_ONCE = 4096

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
) -> ModelPair:
    """Loads a model folder. Raises ModelError.

    make_draft: makes the draft model that is loaded, too, unless the folder lacks it; None: none is.
    dtype "auto" is float32 on the CPU and the checkpoint's own elsewhere. progress: called with the fraction
    that is loaded, after each tensor. max_model_len: positions that are served, which the model's config then
    says; None for all that it was made for. group: its rank's share is loaded.
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
        checked_outline(found)
        own = outline_of(found.spec, found.dtype, found.make_draft, group=group)
        check_memory(found.folder, own, available_bytes(device), device)
        models = ModelPair(found.spec, Placement(device, found.dtype, group=group), found.make_draft)
        _copy(found.stored, by_name(models, found.names), group.rank, progress)
    finish_linears(models.linears())
    return models


def make_dummy_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    make_draft: MakeDraft | None,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
) -> ModelPair:
    """A model of the shape that config.json describes, with random weights: for measurements. Raises
    ModelError.

    The folder needs no weights. They are drawn on the device, the same at each start; with a standard
    deviation of 0.02 and norm weights of 1, as models are initialised, no activation leaves bfloat16's range.
    dtype "auto" is float32 on the CPU and bfloat16 elsewhere. make_draft, max_model_len: as for `load_model`.
    """
    folder = Path(path)
    spec = shortened(read_model_spec(folder), max_model_len)
    target = dummy_dtype(dtype, device)
    check_memory(folder, outline_of(spec, target, make_draft), available_bytes(device), device)
    models = ModelPair(spec, Placement(device, target), make_draft)
    _draw(models, torch.Generator(device).manual_seed(DUMMY_SEED), progress)
    finish_linears(models.linears())
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


def _copy(
    stored: Mapping[str, Reader],
    parameters: Mapping[str, torch.Tensor],
    rank: int,
    progress: Callable[[float], None],
) -> None:
    """Copies the rows that the rank has of a parameter: all, or as many as each other rank."""
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for name, parameter in parameters.items():
        header, count = stored[name].get_slice(name), len(parameter)
        first = rank * count if header.get_shape()[0] > count else 0
        parameter.copy_(header[first : first + count])
        done += parameter.nbytes
        progress(done / total)


def _draw(models: ModelPair, generator: torch.Generator, progress: Callable[[float], None]) -> None:
    parameters = models.tensors()
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for path, parameter in parameters.items():
        if path.endswith("norm"):
            is_offset = models.target.spec.norm.unit_offset and not path.endswith(PLAIN_NORM)
            parameter.fill_(0.0 if is_offset else 1.0)
        else:
            parameter.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)
        done += parameter.nbytes
        progress(done / total)
