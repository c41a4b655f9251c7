"""Reads the headers of a model folder's safetensors files, and checks the tensors against config.json. Reads
no weights, never pickle.

All faults are found here, before memory is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from headway.engine.layers.group import ALONE, Group
from headway.engine.layers.model_pair import MakeDraft, ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.arranging import Arranged, Stored, arranged, missing_of, stored_twice
from headway.engine.loading.files import DTYPES, Header, Reader, listed, open_tensors
from headway.engine.loading.formats import LM_HEAD
from headway.engine.loading.packs import expanded
from headway.engine.models.family import WeightNames
from headway.engine.models.registry import FAMILY_OF, read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import format_bytes

DtypeName = Literal["auto", "float32", "float64", "bfloat16", "float16"]
NAMED_DTYPES: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
EMBEDDING = "embedding"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of the headers of a folder's files, and the open file of each tensor.

    files: the tensors as they are stored. stored: the same with dense weights in place of quantised ones.
    tensors: the same by the names of `names`, where these stand for other tensors. head_tensors: the names of
    stored tensors that belong to a draft head, whether they make a whole one or not. make_draft: makes the
    head that is to be loaded; None: there is none.
    """

    folder: Path
    spec: ModelSpec
    names: WeightNames
    dtype: torch.dtype
    files: Mapping[str, Reader]
    stored: Mapping[str, Reader]
    tensors: Mapping[str, Reader]
    head_tensors: frozenset[str]
    make_draft: MakeDraft | None


def open_checkpoint(
    folder: Path,
    stack: ExitStack,
    *,
    device: torch.device,
    dtype: DtypeName,
    make_draft: MakeDraft | None,
    max_model_len: int | None = None,
) -> Checkpoint:
    """Reads config.json and the headers of the weights, no weights. stack: closes the files. The other
    arguments: as for `load_model`. Raises ModelError."""
    spec = shortened(read_model_spec(folder), max_model_len)
    names = FAMILY_OF[spec.architecture].names(spec)
    files, prefix = open_tensors(folder, stack), names.draft_head_prefix or ""
    stored = files
    if spec.quantization is not None:
        seldom_listed = tuple(start for start in (prefix, *names.vision_prefixes) if start)
        stored = expanded(files, spec.quantization, device, lambda name: name.startswith(seldom_listed))
    heads = frozenset(name for name in stored if prefix and name.startswith(prefix))
    _warn_of_a_missing_head(folder, spec, heads)
    return Checkpoint(
        folder=folder,
        spec=spec,
        names=names,
        dtype=_dtype(dtype, device, stored),
        files=files,
        stored=stored,
        tensors=arranged(stored, names),
        head_tensors=heads,
        make_draft=None if spec.draft_head is not None and not heads else make_draft,
    )


def checked_outline(found: Checkpoint) -> ModelPair:
    """Returns models without memory, all of whose tensors are stored in their shapes. Raises ModelError for
    tensors that are missing, unexpected, or of another shape or dtype."""
    outline = outline_of(found.spec, found.dtype, found.make_draft)
    shapes = by_name(outline, found.names)
    ignored = _vision_tensors(found)
    if found.spec.tied:
        ignored.add(found.names.of(LM_HEAD))
    check_stored(found, shapes, ignored)
    return outline


def check_stored(found: Checkpoint, shapes: Mapping[str, torch.Tensor], ignored: set[str]) -> None:
    """Raises ModelError for tensors that are missing, unexpected, or of another shape or dtype. shapes: the
    parameters by their names in the checkpoint. ignored: the names of tensors that are not read."""
    _check_names(found, shapes, ignored)
    _check_tensors(found.folder, shapes, found.tensors)


def missing_head_tensors(found: Checkpoint, whole: ModelPair) -> list[str]:
    """Returns the names of tensors that the announced draft head has and the files lack. whole: with it."""
    own = () if whole.draft is None else whole.draft.tensors()
    return _missing(found, [found.names.of(path) for path in own])


def are_ties_undecided(found: Checkpoint) -> bool:
    """Returns whether only the weights can tell if the embedding and lm_head are tied, as config.json
    says."""
    both = [found.names.of(path) for path in (EMBEDDING, LM_HEAD)]
    if not found.spec.tied or not set(both) <= found.stored.keys():
        return False
    first, second = (found.stored[name].get_slice(name).get_shape() for name in both)
    return first == second


def check_memory(
    folder: Path, outline: ModelPair, available: int, device: torch.device, *, saved_bytes: int = 0
) -> None:
    """Raises ModelError where the parameters and the rotary table take more than the available bytes of the
    device. saved_bytes: the bytes that quantised weights save against dense ones."""
    num_parameters, dense = parameter_counts(outline)
    needed = dense - saved_bytes
    rotary_bytes = outline.target.rotary_bytes
    if needed <= available < needed + rotary_bytes:
        num_positions = outline.target.spec.max_position_embeddings
        raise ModelError(
            f"the rotary table of {folder} takes {format_bytes(rotary_bytes)} for {num_positions:,} positions "
            f"beside weights of {format_bytes(needed)}, {format_bytes(available)} are available on {device}; "
            "lower --max-model-len"
        )
    if needed > available:
        raise ModelError(
            f"the weights of {folder} take {format_bytes(needed)} ({num_parameters:,} parameters of "
            f"{needed / num_parameters:.3g} bytes), {format_bytes(available)} are available on {device}; "
            "take a smaller --dtype, a smaller model or a larger machine"
        )


def outline_of(
    spec: ModelSpec, dtype: torch.dtype, make_draft: MakeDraft | None = None, *, group: Group = ALONE
) -> ModelPair:
    """Returns models, or a rank's share of them, whose parameters have shapes and no memory."""
    return ModelPair(spec, Placement(torch.device("meta"), dtype, group=group), make_draft)


def by_name(models: ModelPair, names: WeightNames) -> dict[str, torch.Tensor]:
    """Returns the parameters by their names in the checkpoint."""
    return {names.of(path): tensor for path, tensor in models.tensors().items()}


def headers_of(found: Checkpoint, paths: Iterable[str]) -> dict[str, Header]:
    """Returns the headers of the parameters by path. paths: those of stored tensors."""
    named = ((path, found.names.of(path)) for path in paths)
    return {path: found.tensors[name].get_slice(name) for path, name in named}


def parameter_counts(outline: ModelPair) -> tuple[int, int]:
    """Returns the number of parameters and their size in bytes. outline: models without memory, since loaded
    ones may have weights in other formats."""
    tensors = outline.tensors().values()
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)


def dummy_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """Returns the dtype of drawn weights."""
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    return default if name == "auto" else NAMED_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Returns the name of a dtype of weights."""
    return next(name for name, named in NAMED_DTYPES.items() if named == dtype)


def shortened(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    return spec if max_model_len is None else replace(spec, max_position_embeddings=max_model_len)


def _warn_of_a_missing_head(folder: Path, spec: ModelSpec, heads: frozenset[str]) -> None:
    if spec.draft_head is not None and not heads:
        logger.warning(
            "%s: config.json announces a draft head of %d layers, the weights have none that %s could use; the model is "
            "served without speculation",
            folder, spec.draft_head.num_layers, spec.architecture,
        )  # fmt: skip


def _vision_tensors(found: Checkpoint) -> set[str]:
    """Returns the names of the tensors for images, which are not read, and logs that."""
    prefixes = found.names.vision_prefixes
    names = {name for name in found.stored if name.startswith(prefixes)}
    if names:
        listed = ", ".join(f"{prefix}*" for prefix in prefixes)
        logger.info(
            "%s: %d vision tensors (%s) are skipped: no images are served", found.folder, len(names), listed
        )
    return names


def _dtype(name: DtypeName, device: torch.device, stored: Mapping[str, Reader]) -> torch.dtype:
    """Returns the dtype by name. The checkpoint's own dtype is that of most of its tensors."""
    if name != "auto":
        return NAMED_DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    found = [reader.get_slice(tensor).get_dtype() for tensor, reader in stored.items()]
    return DTYPES.get(max(set(found), key=found.count), torch.float32) if found else torch.float32


def _missing(found: Checkpoint, wanted: Iterable[str]) -> list[str]:
    """Returns the names of stored tensors that wanted ones lack, each once."""
    lacking = (name for name in wanted if name not in found.tensors)
    missing = (name for each in lacking for name in missing_of(each, found.stored, found.names))
    return list(dict.fromkeys(missing))


def _check_names(found: Checkpoint, shapes: Mapping[str, torch.Tensor], ignored: set[str]) -> None:
    """Raises ModelError for tensors that are missing, unexpected or stored twice. Rotary frequencies, which
    old checkpoints store, are ignored."""
    folder, stored, prefix = found.folder, found.tensors, found.names.draft_head_prefix
    missing = _missing(found, shapes)
    if missing:
        is_of_head = prefix is not None and all(name.startswith(prefix) for name in missing)
        other_way = ", or serve without the draft head: --drafter none or ngram" if is_of_head else ""
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors: {listed(missing)}; fetch the weights again{other_way}"
        )
    if twice := stored_twice(shapes, found.stored, found.names):
        raise ModelError(
            f"{folder} has {len(twice)} tensors in two layouts: {listed(twice)}; fetch the weights "
            "again into an empty folder"
        )
    is_head_ignored = prefix is not None and found.make_draft is None
    unexpected = [
        name
        for name in stored
        if name not in shapes
        and name not in ignored
        and not (is_head_ignored and name.startswith(str(prefix)))
        and not name.endswith(".rotary_emb.inv_freq")
        and not _is_idle_bias(found, name)
    ]
    if unexpected:
        raise ModelError(
            f"{folder} has {len(unexpected)} tensors that the architecture of its config.json does not have: "
            f"{listed(unexpected)}; check that config.json belongs to these weights"
        )


def _is_idle_bias(found: Checkpoint, name: str) -> bool:
    """Returns whether the tensor is one of the zero biases that tools for GPTQ write for every layer."""
    quantization = found.spec.quantization
    if quantization is None or quantization.method != "gptq" or not name.endswith(".bias"):
        return False
    return not bool(found.stored[name].get_tensor(name).any())


def _check_tensors(folder: Path, shapes: Mapping[str, torch.Tensor], tensors: Mapping[str, Reader]) -> None:
    wrong_shapes, wrong_dtypes = [], []
    parts = (part for name, wanted in shapes.items() for part in _parts_of(name, tensors[name], wanted.shape))
    for name, header, wanted in parts:
        shape, dtype = list(header.get_shape()), header.get_dtype()
        if shape != wanted:
            wrong_shapes.append(f"{name} is {shape}, not {wanted}")
        if dtype not in DTYPES:
            wrong_dtypes.append(f"{name} is {dtype}")
    if wrong_shapes:
        raise ModelError(
            f"{folder} has {len(wrong_shapes)} tensors of another shape than config.json says: "
            f"{listed(wrong_shapes, separator='; ')}; check that config.json belongs to these weights"
        )
    if wrong_dtypes:
        raise ModelError(
            f"{folder} has {len(wrong_dtypes)} tensors of a dtype that is not supported: "
            f"{listed(wrong_dtypes)}; supported are {', '.join(DTYPES)}"
        )


def _parts_of(name: str, reader: Reader, shape: torch.Size) -> list[Stored]:
    """Returns the stored tensors that make up one of this shape."""
    if isinstance(reader, Arranged):
        return reader.stored(shape)
    return [Stored(name, reader.get_slice(name), list(shape))]
