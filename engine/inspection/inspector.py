"""Describes what a start of the engine would find in a model folder, step by step. It continues where a start
would end."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import torch

from headway.engine.inspection.device import Device, find_device
from headway.engine.inspection.head import head_by_names, head_of_checkpoint, head_without_tensors
from headway.engine.inspection.memory import Sizes, size_up
from headway.engine.inspection.problems import Problems
from headway.engine.layers.model_pair import MakeDraft, ModelPair
from headway.engine.layers.placement import Placement
from headway.engine.loading.checkpoint import drawn_headers
from headway.engine.loading.drafter import checked_maker
from headway.engine.loading.files import Header, Reader, open_tensors, stored_bits
from headway.engine.loading.headers import (
    Checkpoint,
    are_ties_undecided,
    checked_outline,
    dummy_dtype,
    headers_of,
    open_checkpoint,
    outline_of,
    parameter_counts,
    shortened,
)
from headway.engine.loading.packs import num_expanded
from headway.engine.loading.placing import expanded_bytes, most_saved_bytes
from headway.engine.loading.quantizing import quantized_packs
from headway.engine.loading.sharing import shared
from headway.engine.models.model_files import is_folder, read_json_object
from headway.engine.models.quantization import KEYS
from headway.engine.models.registry import FAMILY_OF, read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.options import draft_maker
from headway.engine.parallel.group import group_of
from headway.engine.protocol.config import EngineConfig, Quantize
from headway.engine.protocol.inspection import (
    HeadReport,
    Inspection,
    InspectionRequest,
    LayerGroup,
    Shape,
    StoredTensors,
)
from headway.engine.protocol.logs import collected_warnings
from headway.engine.resolve import announced, resolve
from headway.engine.speculation.select import announced_head
from headway.kernels import has_integer_products

logger = logging.getLogger(__name__)


def inspect_model(request: InspectionRequest) -> Inspection:
    """Inspects a model folder by its headers. The files of config.model_path may be missing, broken or of a
    model that is not supported."""
    config, folder, problems = request.config, Path(request.config.model_path), Problems()
    device: Device | None = None
    spec: ModelSpec | None = None
    content: Mapping[str, object] = {}
    stored: Mapping[str, Reader] = {}
    files: Mapping[str, Reader] = {}
    with collected_warnings() as warnings, ExitStack() as stack:
        with problems.noted():
            device = find_device(config, request.gpu_memory_bytes)
        with problems.noted():
            spec = read_model_spec(folder)
        with problems.noted():
            content = read_json_object(folder / "config.json") or {}
        model = None if spec is None else _served_model(config, spec, device, stack, problems)
        if model is not None and model.found is not None:
            stored, files = model.found.stored, model.found.files
        elif config.load_format != "dummy":
            with problems.noted():
                stored = files = open_tensors(folder, stack) if is_folder(folder) else {}
        return Inspection(
            architecture=_architecture(content),
            family=None if spec is None else FAMILY_OF[spec.architecture].model_type,
            supported_architectures=list(FAMILY_OF),
            quantization=_quantization(content, spec),
            shape=None if spec is None else _shape(spec),
            stored=_by_dtype(files),
            num_expanded=num_expanded(stored),
            num_parameters=None if model is None else parameter_counts(model.outline)[0],
            num_active_parameters=None if model is None else model.outline.active_weights,
            draft_head=_head(config, model, stored, content),
            device=None if device is None else device.report,
            memory=None if model is None else model.sizes.memory,
            floor=None if model is None else model.sizes.floor,
            engine=model.sizes.info if model is not None and problems.first is None else None,
            problem=problems.first,
            warnings=warnings,
        )


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of a supported architecture. found: None if no headers could be read. outline: the models that
    would be served, by config.json if the tensors do not fit it."""

    found: Checkpoint | None
    outline: ModelPair
    sizes: Sizes


def _served_model(
    config: EngineConfig, spec: ModelSpec, device: Device | None, stack: ExitStack, problems: Problems
) -> _Model:
    """Repeats the steps of a start from the choice of the context on. Without a device it computes no
    sizes."""
    place = torch.device("cpu") if device is None else device.facts.device
    length = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    make_draft: MakeDraft | None = None
    found, outline = None, None
    quantize = Quantize(config.quantize, config.quantize_lm_head)
    quantized: Mapping[str, Header] = {}
    has_own_folder = config.drafter_path is not None
    if device is not None:
        with problems.noted():
            available = device.bytes_of_rank(config.tensor_parallel_size)
            group = group_of(config.tensor_parallel_size)
            length = resolve(config, announced(config, spec, device.facts, available, group)).max_model_len
    with problems.noted():
        make_draft = draft_maker(config, spec)
    if config.load_format != "dummy":
        with problems.noted():
            found = open_checkpoint(
                Path(config.model_path),
                stack,
                device=place,
                dtype=config.dtype,
                make_draft=None if has_own_folder else make_draft,
                max_model_len=length,
            )
    if found is not None:
        _warn_of_ties(found)
        with problems.noted():
            outline = checked_outline(found)
            quantized = quantized_packs(
                headers_of(found, outline.tensors()), outline, quantize, found.folder, place
            )
    if outline is None:
        dtype = dummy_dtype(config.dtype, place) if found is None else found.dtype
        own = None if has_own_folder else make_draft if found is None else found.make_draft
        outline = outline_of(shortened(spec, length), dtype, own)
        if config.load_format == "dummy":
            drawn = drawn_headers(outline.tensors(), place, unit_offset=spec.norm.unit_offset)
            with problems.noted():
                quantized = quantized_packs(drawn, outline, quantize, Path(config.model_path), place)
    headers: dict[str, Header] = {}
    if found is not None:
        headers = headers_of(found, (p for p in outline.tensors() if found.names.of(p) in found.tensors))
    headers |= quantized
    if config.drafter_path is not None and make_draft is not None:
        if config.load_format != "dummy":
            with problems.noted():
                make_draft = checked_maker(
                    Path(config.drafter_path), stack, outline.target, place, config.drafter_taps
                )
        meta = Placement(torch.device("meta"), outline.target.dtype)
        outline = outline.with_draft(make_draft(outline.target, meta), make_draft)
    elif has_own_folder:
        config = msgspec.structs.replace(config, drafter="none", drafter_path=None)
    if device is None:
        return _Model(found, outline, Sizes())
    # Ranks that cannot share the model were noted as a problem before.
    share = outline if problems.first else outline.outline(group_of(config.tensor_parallel_size))
    saved = expanded = 0
    if place.type == "cpu" and config.cpu_weights != "full" and has_integer_products():
        saved = share.saved_by_integers(config.cpu_weights)
    if device.reads_codes and outline.target.dtype == torch.bfloat16:
        kept = {path: tensor for path, tensor in share.tensors().items() if path in headers}
        headers = headers if problems.first else shared(headers, kept, spec, share.target.group)
        saved, expanded = most_saved_bytes(headers.values()), expanded_bytes(share, headers)
    sizes = size_up(config, spec, share, device, problems, saved_bytes=saved, expanded_bytes=expanded)
    return _Model(found, outline, sizes)


def _warn_of_ties(found: Checkpoint) -> None:
    if are_ties_undecided(found):
        logger.warning(
            "config.json ties lm_head to the embedding, and both are stored: should their values differ, which only a start finds "
            "out, lm_head is loaded, too (%s parameters more)",
            f"{found.spec.vocab_size * found.spec.hidden_size:,}",
        )


def _head(
    config: EngineConfig, model: _Model | None, stored: Mapping[str, Reader], content: Mapping[str, object]
) -> HeadReport:
    if model is None:
        return head_by_names(stored, content)
    target = model.outline.target
    whole = outline_of(target.spec, target.dtype, announced_head(target.spec))
    if model.found is not None:
        return head_of_checkpoint(model.found, config, whole)
    if config.load_format == "dummy":
        is_loaded = model.outline.draft is not None and config.drafter_path is None
        return head_without_tensors(
            whole, "the weights are random (--load-format dummy)", is_loaded=is_loaded
        )
    return head_without_tensors(whole, "no tensors could be read")


def _shape(spec: ModelSpec) -> Shape:
    groups = Counter(spec.layers)
    return Shape(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        is_tied=spec.tied,
        layers=[
            LayerGroup(count, _described(layer.mixer), _described(layer.feed_forward))
            for layer, count in groups.items()
        ],
    )


def _described(part: object) -> dict[str, object]:
    """AttentionSpec(num_heads=32, ...) -> {"kind": "attention", "num_heads": 32, ...}"""
    name = type(part).__name__.removesuffix("Spec")
    return {"kind": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(), **msgspec.to_builtins(part)}


def _by_dtype(stored: Mapping[str, Reader]) -> list[StoredTensors]:
    """Returns the tensors grouped by dtype, the most frequent dtype first."""
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for name, reader in stored.items():
        header = reader.get_slice(name)
        counts[header.get_dtype()] += 1
        elements[header.get_dtype()] += prod(header.get_shape())
    return [
        StoredTensors(dtype, count, elements[dtype], elements[dtype] * stored_bits(dtype) // 8)
        for dtype, count in counts.most_common()
    ]


def _architecture(content: Mapping[str, object]) -> str | None:
    names = content.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _quantization(content: Mapping[str, object], spec: ModelSpec | None) -> str | None:
    """Returns the method of quantisation that config.json names, supported or not."""
    if spec is not None:
        return None if spec.quantization is None else spec.quantization.method
    text = content.get("text_config")
    for level in (content, text if isinstance(text, dict) else {}):
        for key in KEYS:
            found = level.get(key)
            if found is not None:
                return str(found.get("quant_method") if isinstance(found, dict) else found)
    return None
