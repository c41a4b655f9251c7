"""Finds the MTP head of a checkpoint: whether it is announced, whether its tensors are there, and why it is
not loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading.files import unread_files
from headway.engine.loading.headers import Checkpoint, missing_head_tensors
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.inspection import HeadReport, HeadState

# The keys of config.json in which families give the number of MTP layers.
LAYER_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
# Names of an MTP head's tensors in any family; some families number its layers after those of the decoder
# instead.
_MTP_NAME = re.compile(r"(?:^|.*?\.)mtp(?:_\w+)?(?:\.\d+)?\.")
_LAYER_NAME = re.compile(r".*?\blayers\.(\d+)\.")


def head_of_checkpoint(found: Checkpoint, config: EngineConfig, whole: ModelPair) -> HeadReport:
    """Reports on the head of a checkpoint. whole: the model with the head, if config.json announces one.
    config: its drafter may be auto."""
    spec, prefix, num_stored = found.spec, found.names.draft_head_prefix, len(found.head_tensors)
    missing = missing_head_tensors(found, whole)
    shown = f"{num_stored} tensors" if num_stored != 1 else "1 tensor"
    report = HeadReport(
        state="found",
        num_layers=0 if spec.draft_head is None else spec.draft_head.num_layers,
        num_stored_tensors=num_stored,
        prefixes=_prefixes(found.head_tensors),
        missing_tensors=missing,
        num_parameters=_num_parameters(whole),
        is_loaded=found.make_draft is not None,
    )
    if spec.draft_head is None:
        none = "config.json announces none" if prefix else f"{spec.architecture} has none"
        unread = f", so that {shown} with names from {prefix} are not read" if num_stored else ""
        return _because(report, "none", none + unread)
    if num_stored == 0:
        others = unread_files(found.folder)
        unread = f"; not read, because no index names them: {', '.join(others)}" if others else ""
        nothing = f"config.json announces one, but no tensor's name begins with {prefix}"
        return _because(report, "missing", nothing + unread)
    if missing:
        return _because(report, "incomplete", f"{len(missing)} of its tensors are missing")
    if not report.is_loaded:
        flag = f"--drafter {config.drafter_path or config.drafter}" if config.depth else "--depth 0"
        return _because(report, "found", f"{flag} needs none")
    return report


def head_without_tensors(whole: ModelPair, why: str, *, is_loaded: bool = False) -> HeadReport:
    """Reports on a head that is known from config.json only. whole: the model with all that it announces."""
    head = whole.draft
    return HeadReport(
        state="none" if head is None else "unknown",
        num_layers=0 if head is None else head.num_layers,
        num_parameters=_num_parameters(whole),
        is_loaded=is_loaded,
        reason="config.json announces none" if head is None else why,
    )


def head_by_names(names: Iterable[str], content: Mapping[str, object]) -> HeadReport:
    """Reports on a head by the names of tensors. names: those of all tensors that could be read. content:
    that of config.json, whose architecture is not supported or does not fit."""
    text = content.get("text_config")
    levels = [text, content] if isinstance(text, dict) else [content]
    counts = [level.get(key) for level in levels for key in LAYER_COUNT_KEYS]
    announced = next((count for count in counts if isinstance(count, int) and count > 0), 0)
    depths = [level.get("num_hidden_layers") for level in levels]
    depth = next((count for count in depths if isinstance(count, int)), None)
    found = [name for name in names if _is_of_head(name, depth if announced else None)]
    reason = "the model cannot be served" if found else "its tensors cannot be found"
    if not found and not announced:
        reason = "config.json announces none"
    return HeadReport(
        state="unknown" if found or announced else "none",
        num_layers=announced,
        num_stored_tensors=len(found),
        prefixes=_prefixes(found),
        reason=reason,
    )


def _because(report: HeadReport, state: HeadState, reason: str) -> HeadReport:
    return msgspec.structs.replace(report, state=state, reason=reason)


def _num_parameters(whole: ModelPair) -> int | None:
    head = whole.draft
    return None if head is None else sum(tensor.numel() for tensor in head.tensors().values())


def _is_of_head(name: str, depth: int | None) -> bool:
    """Returns whether the tensor belongs to a head. depth: the number of decoder layers, if the head's may be
    numbered after them."""
    layer = _LAYER_NAME.match(name)
    is_after = depth is not None and layer is not None and int(layer[1]) >= depth
    return is_after or _MTP_NAME.match(name) is not None


def _prefixes(names: Iterable[str]) -> list[str]:
    """`model.mtp_layers.0.input_proj.weight` -> `model.mtp_layers.0.`"""
    matches = (_MTP_NAME.match(name) or _LAYER_NAME.match(name) for name in names)
    return sorted({match[0] for match in matches if match is not None})
