"""The safetensors files of a model folder, opened without reading weights. Never pickle."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from headway.engine.models.model_files import check_readable, is_regular_file, read_json_object
from headway.engine.protocol.errors import ModelError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# The dtypes of weights that are read as they are, by their names in safetensors.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_NAMES_SHOWN = 8

Span = tuple[int, int]  # the first of some rows of a tensor, and their number

logger = logging.getLogger(__name__)


class Header(Protocol):
    """Describes one tensor of a file without reading it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor: ...


class Reader(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Header: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class OneTensor(ABC):
    """A tensor that is made when it is read. It is its own Reader and Header."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def get_shape(self) -> list[int]: ...

    @abstractmethod
    def get_dtype(self) -> str: ...

    @abstractmethod
    def __getitem__(self, places: slice | tuple[slice, slice]) -> torch.Tensor: ...

    def keys(self) -> list[str]:
        return [self._name]

    def get_slice(self, name: str) -> Self:
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[:]


def stored_bits(dtype: str) -> int:
    """Returns the bits of a number. safetensors names dtypes by them, such as BF16, F8_E4M3 and F4; BOOL has
    8."""
    digits = re.search(r"\d+", dtype)
    return 8 if digits is None else int(digits[0])


def spans_within(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Returns the rows from start up to end of all spans' rows, which follow each other: of (0, 4) and (8, 4)
    the rows from 2 up to 6 are (2, 2) and (8, 2)."""
    found, before = [], 0
    for first, count in spans:
        low, high = max(start - before, 0), min(end - before, count)
        if low < high:
            found.append((first + low, high - low))
        before += count
    return found


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Reader]:
    """Returns the open file that holds each tensor. If two files have it, the later one in the order of names
    counts, as in transformers."""
    stored: dict[str, Reader] = {}
    for file in _weight_files(folder):
        check_readable(file)
        try:
            reader: Reader = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None
        names = list(reader.keys())
        if twice := [name for name in names if name in stored]:
            logger.warning(
                "%s: %s has %d tensors that an earlier file has, too: %s; those of this file are used",
                folder, file.name, len(twice), listed(twice),
            )  # fmt: skip
        stored |= dict.fromkeys(names, reader)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    """Returns the one file, or all shards that the index names."""
    if is_regular_file(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if is_regular_file(folder / INDEX_FILE):
        files = [folder / name for name in _shard_names(folder / INDEX_FILE)]
        missing = [file.name for file in files if not is_regular_file(file)]
        if missing:
            raise ModelError(
                f"{folder} lacks {listed(missing)}, named in {INDEX_FILE}; fetch the missing files"
            )
        return files
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ModelError(
            f"{folder} has weights only as pickle ({listed(pickled)}), which can run code when it is read; "
            f"convert them to {WEIGHTS_FILE} (save_pretrained of transformers does it)"
        )
    raise ModelError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; fetch the weights")


def unread_files(folder: Path) -> list[str]:
    """Returns the names of safetensors files in the folder that belong to no model: another file is whole, or
    the index names others."""
    read = {file.name for file in _weight_files(folder)}
    return sorted(file.name for file in folder.glob("*.safetensors") if file.name not in read)


def _shard_names(index: Path) -> list[str]:
    content = read_json_object(index, wanted="an object with a weight_map") or {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is no JSON object with a weight_map; fetch the file again")
    names = sorted(set(map(str, weight_map.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its folder: {listed(outside)}")
    return names


def listed(names: list[str], *, separator: str = ", ") -> str:
    shown = separator.join(names[:MAX_NAMES_SHOWN])
    hidden = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
