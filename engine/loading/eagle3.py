"""Loads an EAGLE-3 head from a folder of its own, in both published layouts, or draws weights of its
shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.eagle3_head import Eagle3Head
from headway.engine.layers.model_pair import DraftModel, MakeDraft
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.layers.placement import Placement
from headway.engine.loading.checkpoint import ROWS_AT_ONCE, copy_tensors, drawn_headers
from headway.engine.loading.files import Header, open_tensors
from headway.engine.loading.headers import Checkpoint, check_stored, headers_of
from headway.engine.loading.packs import expanded
from headway.engine.loading.sharing import shared
from headway.engine.models.eagle3 import Eagle3Spec
from headway.engine.models.family import LAYER_NAMES, WeightNames
from headway.engine.protocol.errors import ModelError
from headway.engine.state.memory import available_bytes, format_bytes

# The target's id of draft token i is i + d2t[i]; t2d says for each id of the target whether it is one.
OFFSETS, IS_DRAFTED = "d2t", "t2d"
ORIGINAL_LAYER = "midlayer"
# Trainers store tensors of the target under this prefix.
_OF_TARGET = "verifier_"

Head = TypeVar("Head", bound=DraftModel)


def load_eagle3(
    folder: Path, spec: Eagle3Spec, target: CausalLM, progress: Callable[[float], None]
) -> tuple[Eagle3Head, MakeDraft]:
    """Returns the head in the folder, which the spec describes, and a function that makes others of its
    shape. Raises ModelError. progress: called with the loaded fraction after each tensor."""
    with ExitStack() as stack:
        found, spec, draft_ids = open_eagle3(folder, spec, stack, target, target.device)
        make_head = partial(Eagle3Head, _without_copy(spec, found, target))
        head = made_head(folder, make_head, target)
        fill_head(head.tensors(), headers_of(found, head.tensors()), target, progress)
        head.draft_ids.copy_(draft_ids)
    return head, make_head


def draw_head(
    folder: Path, make_head: MakeDraft, target: CausalLM, progress: Callable[[float], None]
) -> tuple[DraftModel, MakeDraft]:
    """Returns a head of the shape that the folder's config.json describes, with random weights, norms that
    multiply by 1, and the target's first ids as its vocabulary, and what made it. Raises ModelError."""
    head = made_head(folder, make_head, target)
    has_offset = target.spec.norm.unit_offset and isinstance(head, MtpHead)
    whole = make_head(target, Placement(torch.device("meta"), target.dtype)).tensors()
    fill_head(head.tensors(), drawn_headers(whole, target.device, unit_offset=has_offset), target, progress)
    return head, make_head


def open_eagle3(
    folder: Path, spec: Eagle3Spec, stack: ExitStack, target: CausalLM, device: torch.device
) -> tuple[Checkpoint, Eagle3Spec, torch.Tensor]:
    """Reads the headers of the weights. Returns them, the spec completed by them, and the ids of the draft
    tokens, [draft vocab] int64, which are the only values that are read. spec: that of the folder's
    config.json. stack: closes the files. device: expands quantised weights. Raises ModelError for what is
    missing, unexpected, or of another shape or dtype, and for ids that no draft token can have."""
    stored = files = open_tensors(folder, stack)
    if spec.decoder.quantization is not None:
        stored = expanded(files, spec.decoder.quantization, device, lambda name: False)
    is_original = any(name.startswith(f"{ORIGINAL_LAYER}.") for name in stored)
    num_layers = len(spec.decoder.layers)
    if is_original and num_layers > 1:
        raise ModelError(
            f"config.json of {folder} says {num_layers} layers (num_hidden_layers), the weights have one, {ORIGINAL_LAYER}; "
            "check that config.json belongs to these weights"
        )
    names = _names(spec, ORIGINAL_LAYER if is_original else "layers.{}")
    spec = replace(spec, has_embedding=spec.has_embedding or names.of("eagle.embedding") in stored)
    if (mask := names.of("eagle.mask_taps")) in stored:
        spec = replace(spec, mask_axes=len(stored[mask].get_slice(mask).get_shape()))
    found = Checkpoint(folder, spec.decoder, names, target.dtype, files, stored, stored, frozenset(), None)
    whole = Eagle3Head(spec, target, Placement(torch.device("meta"), target.dtype))
    unread = {name for name in stored if name.startswith(_OF_TARGET)}
    check_stored(found, _by_name(whole, found), {OFFSETS, IS_DRAFTED, *unread})
    return found, spec, read_draft_ids(found, spec.draft_vocab_size)


def _without_copy(spec: Eagle3Spec, found: Checkpoint, target: CausalLM) -> Eagle3Spec:
    """Returns the spec without an own embedding if the head only stores a copy of the target's, as
    `speculators` does: it would take 1 GB for a model of 8B parameters. Reads some rows at a time."""
    name, own = found.names.of("eagle.embedding"), target.embedding
    if not spec.has_embedding or spec.decoder.hidden_size != own.shape[1]:
        return spec
    header = found.stored[name].get_slice(name)
    places = (slice(start, start + ROWS_AT_ONCE) for start in range(0, len(own), ROWS_AT_ONCE))
    is_copy = all(torch.equal(header[rows].to(own.device, own.dtype), own[rows]) for rows in places)
    return replace(spec, has_embedding=not is_copy)


def _by_name(head: Eagle3Head, found: Checkpoint) -> dict[str, torch.Tensor]:
    """Returns the parameters by their names in the checkpoint."""
    return {found.names.of(path): tensor for path, tensor in head.tensors().items()}


def _names(spec: Eagle3Spec, layer: str) -> WeightNames:
    """Returns the names of the parameters. layer: the name of a layer, with {} for its index."""
    tap_norm = "input_norm" if spec.fusion == "whole_norm" else "fc_norm.{}"
    of_layer = {"hidden_norm": "hidden_norm.weight", **LAYER_NAMES}
    names = {
        "embedding": "embed_tokens.weight",
        "tap_norms.{}.norm": f"{tap_norm}.weight",
        "input.weight": "fc.weight",
        "mask_taps": "mask_hidden",
        "final_norm": "norm.weight",
        "lm_head.weight": "lm_head.weight",
        **{f"layers.{{}}.{path}": f"{layer}.{name}" for path, name in of_layer.items()},
    }
    return WeightNames({f"eagle.{path}": name for path, name in names.items()})


def read_draft_ids(found: Checkpoint, count: int) -> torch.Tensor:
    """Returns [count] int64, the target's ids of the draft tokens. Raises ModelError where they are missing,
    for ids that the target does not have, and for two that are the same."""
    ids, size = torch.arange(count), found.spec.vocab_size
    if OFFSETS not in found.stored and count < size:
        raise ModelError(
            f"{found.folder} lacks {OFFSETS}, which gives the model's ids of its {count:,} draft tokens; fetch the weights again"
        )
    if OFFSETS not in found.stored:
        return ids
    offsets = found.stored[OFFSETS].get_tensor(OFFSETS)
    # PyTorch does not add unsigned integers of more than 8 bits to int64.
    if offsets.shape != ids.shape or offsets.dtype not in (torch.int64, torch.int32):
        raise ModelError(
            f"{OFFSETS} of {found.folder} is {list(offsets.shape)} {offsets.dtype}; it must be [{len(ids)}] of int64 or int32; "
            "fetch the weights again"
        )
    ids += offsets
    different = set(ids.tolist())
    if min(different) < 0 or max(different) >= size or len(different) < len(ids):
        raise ModelError(
            f"{OFFSETS} of {found.folder} gives {len(different):,} ids from {min(different):,} to {max(different):,} for "
            f"{len(ids):,} draft tokens; they must be different ones below {size:,}; fetch the weights again"
        )
    return ids


def fill_head(
    parameters: Mapping[str, torch.Tensor],
    headers: Mapping[str, Header],
    target: CausalLM,
    progress: Callable[[float], None],
) -> None:
    """Copies the rank's share of the whole tensors to the parameters. headers: those of the whole tensors, by
    path."""
    copy_tensors(shared(headers, parameters, target.spec, target.group), parameters, progress)


def made_head(folder: Path, make_head: Callable[[CausalLM, Placement], Head], target: CausalLM) -> Head:
    """Returns a head, or a rank's share of it, on the target's device. Raises ModelError where its parameters
    take more memory than is available."""
    place = Placement(target.device, target.dtype, group=target.group)
    outline = make_head(target, replace(place, device=torch.device("meta")))
    needed, available = sum(t.nbytes for t in outline.tensors().values()), available_bytes(place.device)
    if needed > available:
        raise ModelError(
            f"the weights of the drafter {folder} take {format_bytes(needed)}, {format_bytes(available)} are available "
            f"on {place.device} beside the model; take a smaller drafter, or --drafter ngram"
        )
    return make_head(target, place)
