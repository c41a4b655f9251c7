"""Writes a model folder anew, its linear weights quantised, file by file, so that no second copy of the model
is in memory."""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headway.engine.loading.arranging import names_of_experts
from headway.engine.loading.files import INDEX_FILE, WEIGHTS_FILE, Header, Reader, stored_bits
from headway.engine.loading.formats import FORMATS, GROUP, LM_HEAD, ROWS_AT_ONCE, Parts, scheme_of
from headway.engine.loading.headers import EMBEDDING, Checkpoint, checked_outline, open_checkpoint
from headway.engine.loading.quantizing import quantized_paths
from headway.engine.models.model_files import read_json_object
from headway.engine.models.registry import read_model_spec
from headway.engine.options import draft_maker
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError

SHARD_BYTES = 4 << 30

# Weights for other programs in folders beside the files: they are not copied, while templates are.
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf", "*.onnx")


@dataclass(frozen=True, slots=True)
class Written:
    """The result of quantising. num_quantized: the number of weights with scales. bytes_before, bytes_after:
    the sizes of all tensors. kept: the layers whose weights are not quantised."""

    num_quantized: int
    bytes_before: int
    bytes_after: int
    kept: list[str]


def quantize_folder(
    source: Path,
    target: Path,
    name: str,
    *,
    with_lm_head: bool,
    device: torch.device,
    progress: Callable[[float], None],
) -> Written:
    """Writes `target` from `source`. Raises ModelError or OSError.

    name: a key of FORMATS. with_lm_head: the lm_head is quantised, too. progress: called with the finished
    share.
    """
    own = FORMATS[name]
    content = read_json_object(source / "config.json") or {}
    spec = read_model_spec(source)
    if spec.quantization is not None:
        raise ModelError(
            f"{source} is quantized already ({spec.quantization.method}); take the model's unquantized checkpoint"
        )
    if target.is_dir() and any(_is_of_a_model(file) for file in target.iterdir()):
        raise ModelError(f"{target} holds a model already, or a part of one; name another folder")
    if with_lm_head and spec.tied:
        raise ModelError(
            f"the lm_head of {source} is its embedding, which stays as it is; leave out --quantize-lm-head"
        )
    with ExitStack() as stack:
        found = open_checkpoint(
            source, stack, device=torch.device("cpu"), dtype="auto",
            make_draft=draft_maker(EngineConfig(model_path=str(source)), spec),
        )  # fmt: skip
        linears, stacks = quantized_paths(checked_outline(found), own, with_lm_head=with_lm_head)
        experts = {name: names_of_experts(name, found.names) for name in map(found.names.of, stacks)}
        wanted = {part for parts in experts.values() for own_parts in parts for part in own_parts}
        wanted.update(map(found.names.of, linears))
        if not wanted:
            raise ModelError(
                f"no weight of {source} has inputs in whole groups of {GROUP}; take another --format"
            )
        target.mkdir(parents=True, exist_ok=True)

        def parts_of(name: str, tensor: torch.Tensor) -> Parts:
            if name in experts:
                # Packs have experts one by one.
                pairs = zip(experts[name], tensor, strict=True)
                single = (
                    zip(own_parts, rows.chunk(len(own_parts)), strict=True) for own_parts, rows in pairs
                )
                return dict(ChainMap(*(parts_of(*part) for parts in single for part in parts)))
            if name not in wanted:
                return {name: tensor}
            layer = name.removesuffix("weight")
            pieces = [own.parts(rows.to(device)) for rows in torch.split(tensor, ROWS_AT_ONCE)]
            parts = {kind: torch.cat([piece[kind] for piece in pieces]).cpu() for kind in pieces[0]}
            if "weight_shape" in parts:
                parts["weight_shape"] = torch.tensor(tensor.shape)
            return {layer + kind: part for kind, part in parts.items()}

        before, after = _write_tensors(found.stored, target, parts_of, progress)
        kept = _kept(found, wanted)
    config = content | {"quantization_config": scheme_of(own, kept)}
    for file in source.iterdir():
        if file.is_dir() and not file.name.startswith("."):
            shutil.copytree(file, target / file.name, ignore=shutil.ignore_patterns(*OTHER_WEIGHTS))
        elif (
            file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX_FILE, "config.json")
        ):
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Written(len(wanted), before, after, kept)


def _is_of_a_model(file: Path) -> bool:
    return file.name in ("config.json", INDEX_FILE) or file.suffix in (".safetensors", ".part")


def _kept(found: Checkpoint, wanted: set[str]) -> list[str]:
    """Returns the layers whose weights stay as they are, embeddings excepted: a tied lm_head and what sees
    images, too, for readers take every linear layer that is not listed to be quantised."""
    matrices = {
        name
        for name, reader in found.stored.items()
        if name.endswith(".weight") and len(reader.get_slice(name).get_shape()) > 1
    }
    kept = (matrices | {found.names.of(LM_HEAD)}) - wanted - {found.names.of(EMBEDDING)}
    return sorted(name.removesuffix(".weight") for name in kept)


def _write_tensors(
    stored: Mapping[str, Reader],
    target: Path,
    parts_of: Callable[[str, torch.Tensor], Parts],
    progress: Callable[[float], None],
) -> tuple[int, int]:
    """Returns the bytes of all tensors before and after. Writes files of about SHARD_BYTES.

    parts_of: returns the tensors that are written for one tensor, by name.
    """
    sizes = {name: _bytes_of(reader.get_slice(name)) for name, reader in stored.items()}
    total, done, written = sum(sizes.values()), 0, 0
    shards: list[list[str]] = []
    shard: Parts = {}
    for name, reader in stored.items():
        shard |= parts_of(name, reader.get_tensor(name))
        done += sizes[name]
        size = sum(tensor.nbytes for tensor in shard.values())
        if size >= SHARD_BYTES or done == total:
            try:
                save_file(shard, target / f"{len(shards)}.part", metadata={"format": "pt"})
            except SafetensorError as error:
                raise ModelError(f"{target} cannot be written: {error}") from None
            shards.append(list(shard))
            written, shard = written + size, {}
        progress(done / total)
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    else:
        weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    for n, name in enumerate(names):
        (target / f"{n}.part").rename(target / name).chmod(0o644)
    return total, written


def _bytes_of(header: Header) -> int:
    return prod(header.get_shape()) * stored_bits(header.get_dtype()) // 8
