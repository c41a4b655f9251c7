"""Reads a model folder in Hugging Face layout: config.json and safetensors files, never pickle; or draws weights.

Everything that can be wrong is found in the files' headers before memory is taken; then tensors are
streamed one by one into the parameters, so that no second copy of the model exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import rotary_table
from headway.engine.layers.weights import pack_all
from headway.engine.models.family import WeightNames
from headway.engine.models.model_files import is_regular_file, read_json_object
from headway.engine.models.registry import FAMILY_OF, read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import available_bytes, format_bytes

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMED_DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
DUMMY_SEED, DUMMY_STANDARD_DEVIATION = 0, 0.02
MAX_NAMES_SHOWN = 8
EMBEDDING, LM_HEAD = "embedding", "lm_head"
ROWS_AT_ONCE = 4096

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "float64", "bfloat16", "float16"]


class Header(Protocol):
    """Describes one tensor of a file without reading it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class Reader(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Header: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    with_draft_head: bool,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
) -> CausalLM:
    """Loads a model folder, with its MTP head if it ships one and `with_draft_head`. Raises ModelError.

    dtype "auto" is float32 on the CPU and the checkpoint's own elsewhere. progress: called with the fraction
    that is loaded, after each tensor. max_model_len: positions that are served, which the model's config then says;
    None for all that it was made for.
    """
    folder = Path(path)
    spec = _shortened(read_model_spec(folder), max_model_len)
    names = FAMILY_OF[spec.architecture].names(spec)
    with ExitStack() as stack:
        stored = _open_tensors(folder, stack)
        heads = {
            name for name in stored if names.draft_head_prefix and name.startswith(names.draft_head_prefix)
        }
        has_draft_head = with_draft_head and spec.draft_head is not None and len(heads) > 0
        _warn_of_a_missing_head(folder, spec, heads)
        target = _dtype(dtype, device, stored)
        spec = _with_true_ties(folder, spec, names, stored, target)
        shapes = _by_name(_on_meta(spec, target, with_draft_head=has_draft_head), names)
        ignored = set() if has_draft_head else heads
        if spec.tied:
            ignored.add(names.of(LM_HEAD))
        _check_names(folder, shapes, stored, ignored)
        _check_tensors(folder, shapes, stored)
        _check_memory(folder, spec, shapes.values(), target, device)
        model = CausalLM(spec, Placement(device, target), with_draft_head=has_draft_head)
        _copy(stored, _by_name(model, names), progress)
    pack_all(model.linears())
    return model


def make_dummy_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: DtypeName,
    with_draft_head: bool,
    progress: Callable[[float], None],
    max_model_len: int | None = None,
) -> CausalLM:
    """A model of the shape that config.json describes, with random weights: for measurements. Raises ModelError.

    The folder needs no weights. They are drawn on the device, the same at each start; with a standard
    deviation of 0.02 and norm weights of 1, as models are initialised, no activation leaves bfloat16's range.
    dtype "auto" is float32 on the CPU and bfloat16 elsewhere. max_model_len: as for `load_model`.
    """
    folder = Path(path)
    spec = _shortened(read_model_spec(folder), max_model_len)
    has_draft_head = with_draft_head and spec.draft_head is not None
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = default if dtype == "auto" else NAMED_DTYPES[dtype]
    _check_memory(
        folder,
        spec,
        _on_meta(spec, target, with_draft_head=has_draft_head).tensors().values(),
        target,
        device,
    )
    model = CausalLM(spec, Placement(device, target), with_draft_head=has_draft_head)
    _draw(model, torch.Generator(device).manual_seed(DUMMY_SEED), progress)
    pack_all(model.linears())
    return model


def parameter_counts(model: CausalLM) -> tuple[int, int]:
    """Returns (number of parameters, their size in bytes)."""
    twin = _on_meta(model.spec, model.dtype, with_draft_head=model.draft_head is not None)
    tensors = twin.tensors().values()
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)


def _on_meta(spec: ModelSpec, dtype: torch.dtype, *, with_draft_head: bool) -> CausalLM:
    """Returns a model whose parameters have shapes and no memory."""
    return CausalLM(spec, Placement(torch.device("meta"), dtype), with_draft_head=with_draft_head)


def _by_name(model: CausalLM, names: WeightNames) -> dict[str, torch.Tensor]:
    """Returns the model's parameters by their names in the checkpoint."""
    return {names.of(path): tensor for path, tensor in model.tensors().items()}


def _shortened(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    return spec if max_model_len is None else replace(spec, max_position_embeddings=max_model_len)


def _warn_of_a_missing_head(folder: Path, spec: ModelSpec, heads: set[str]) -> None:
    if spec.draft_head is not None and not heads:
        logger.warning(
            "%s: config.json announces an MTP head (num_nextn_predict_layers is %d), the weights have none "
            "that %s could use; the model is served without speculation",
            folder, spec.draft_head.num_layers, spec.architecture,
        )  # fmt: skip


def _with_true_ties(
    folder: Path, spec: ModelSpec, names: WeightNames, stored: Mapping[str, Reader], dtype: torch.dtype
) -> ModelSpec:
    """Two tensors that differ are not tied, whatever config.json says: as transformers decides it."""
    embedding, lm_head = names.of(EMBEDDING), names.of(LM_HEAD)
    if not spec.tied or not {embedding, lm_head} <= stored.keys():
        return spec
    if _are_equal(stored[embedding].get_slice(embedding), stored[lm_head].get_slice(lm_head), dtype):
        return spec
    logger.warning(
        "%s: config.json has tie_word_embeddings true, but the weights hold an %s that differs from %s; it is "
        "used (as by transformers). Set tie_word_embeddings to false to silence this line",
        folder, lm_head, embedding,
    )  # fmt: skip
    return replace(spec, tied=False)


def _are_equal(first: Header, second: Header, dtype: torch.dtype) -> bool:
    """Returns whether their values are, once they have this dtype. Reads some rows at a time."""
    if first.get_shape() != second.get_shape():
        return False
    starts = range(0, first.get_shape()[0], ROWS_AT_ONCE) if first.get_shape() else ()
    places = (slice(start, start + ROWS_AT_ONCE) for start in starts)
    return all(torch.equal(first[rows].to(dtype), second[rows].to(dtype)) for rows in places)


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Reader]:
    """The open file that holds each tensor; of two files the later in the order of their names, as in transformers."""
    stored: dict[str, Reader] = {}
    for file in _weight_files(folder):
        try:
            reader: Reader = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None
        names = list(reader.keys())
        if twice := [name for name in names if name in stored]:
            logger.warning(
                "%s: %s has %d tensors that an earlier file has, too: %s; those of this file are used",
                folder, file.name, len(twice), _listed(twice),
            )  # fmt: skip
        stored |= dict.fromkeys(names, reader)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    """The one file, or all shards that the index names."""
    if is_regular_file(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if is_regular_file(folder / INDEX_FILE):
        files = [folder / name for name in _shard_names(folder / INDEX_FILE)]
        missing = [file.name for file in files if not is_regular_file(file)]
        if missing:
            raise ModelError(
                f"{folder} lacks {_listed(missing)}, named in {INDEX_FILE}; fetch the missing files"
            )
        return files
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ModelError(
            f"{folder} has weights only as pickle ({_listed(pickled)}), which can run code when it is read; "
            f"convert them to {WEIGHTS_FILE} (save_pretrained of transformers does it)"
        )
    raise ModelError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; fetch the weights")


def _shard_names(index: Path) -> list[str]:
    content = read_json_object(index, wanted="an object with a weight_map") or {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is no JSON object with a weight_map; fetch the file again")
    names = sorted(set(map(str, weight_map.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its folder: {_listed(outside)}")
    return names


def _dtype(name: DtypeName, device: torch.device, stored: Mapping[str, Reader]) -> torch.dtype:
    """The checkpoint's own dtype is that of most of its tensors."""
    if name != "auto":
        return NAMED_DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    found = [reader.get_slice(tensor).get_dtype() for tensor, reader in stored.items()]
    return DTYPES.get(max(set(found), key=found.count), torch.float32) if found else torch.float32


def _check_names(
    folder: Path, shapes: Mapping[str, torch.Tensor], stored: Mapping[str, Reader], ignored: set[str]
) -> None:
    """Rotary frequencies, which old checkpoints store, are computed here."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors: {_listed(missing)}; fetch the weights again"
        )
    unexpected = [
        name
        for name in stored
        if name not in shapes and name not in ignored and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unexpected:
        raise ModelError(
            f"{folder} has {len(unexpected)} tensors that the architecture of its config.json does not have: "
            f"{_listed(unexpected)}; check that config.json belongs to these weights"
        )


def _check_tensors(folder: Path, shapes: Mapping[str, torch.Tensor], stored: Mapping[str, Reader]) -> None:
    wrong_shapes, wrong_dtypes = [], []
    for name, wanted in shapes.items():
        header = stored[name].get_slice(name)
        shape, dtype = list(header.get_shape()), header.get_dtype()
        if shape != list(wanted.shape):
            wrong_shapes.append(f"{name} is {shape}, not {list(wanted.shape)}")
        if dtype not in DTYPES:
            wrong_dtypes.append(f"{name} is {dtype}")
    if wrong_shapes:
        raise ModelError(
            f"{folder} has {len(wrong_shapes)} tensors of another shape than config.json says: "
            f"{_listed(wrong_shapes, separator='; ')}; check that config.json belongs to these weights"
        )
    if wrong_dtypes:
        raise ModelError(
            f"{folder} has {len(wrong_dtypes)} tensors of a dtype that is not supported: "
            f"{_listed(wrong_dtypes)}; supported are {', '.join(DTYPES)}"
        )


def _check_memory(
    folder: Path, spec: ModelSpec, tensors: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """tensors: the parameters, of which only the sizes are read; the rotary table is needed, too."""
    on_meta = Placement(torch.device("meta"), dtype)
    positions = rotary_table(spec.attention.rope, spec.max_position_embeddings, on_meta)
    sizes = [(tensor.numel(), tensor.nbytes) for tensor in tensors]
    num_parameters, needed = sum(n for n, _ in sizes), sum(n for _, n in sizes)
    available = available_bytes(device)
    if needed <= available < needed + positions.nbytes:
        raise ModelError(
            f"the rotary table of {folder} takes {format_bytes(positions.nbytes)} for {len(positions):,} positions "
            f"beside weights of {format_bytes(needed)}, {format_bytes(available)} are available on {device}; "
            "lower --max-model-len"
        )
    if needed > available:
        raise ModelError(
            f"the weights of {folder} take {format_bytes(needed)} ({num_parameters:,} parameters of "
            f"{needed // num_parameters} bytes), {format_bytes(available)} are available on {device}; "
            "take a smaller --dtype, a smaller model or a larger machine"
        )


def _copy(
    stored: Mapping[str, Reader], parameters: Mapping[str, torch.Tensor], progress: Callable[[float], None]
) -> None:
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for name, parameter in parameters.items():
        parameter.copy_(stored[name].get_tensor(name))
        done += parameter.nbytes
        progress(done / total)


def _draw(model: CausalLM, generator: torch.Generator, progress: Callable[[float], None]) -> None:
    parameters = model.tensors()
    total, done = sum(tensor.nbytes for tensor in parameters.values()), 0
    for path, parameter in parameters.items():
        if path.endswith("norm"):
            parameter.fill_(0.0 if model.spec.norm.unit_offset else 1.0)
        else:
            parameter.normal_(0.0, DUMMY_STANDARD_DEVIATION, generator=generator)
        done += parameter.nbytes
        progress(done / total)


def _listed(names: list[str], *, separator: str = ", ") -> str:
    shown = separator.join(names[:MAX_NAMES_SHOWN])
    hidden = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
