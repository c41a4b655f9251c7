"""`headway inspect`: prints what is known of a model folder without its weights, for people or as JSON."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from headway.engine import ConfigError, EngineConfig, HeadReport, Inspection, LayerGroup
from headway.server.base.config import InspectConfig, ModelSource
from headway.server.cli.console import readable_count, readable_size, show
from headway.server.cli.endings import NOT_SERVABLE
from headway.server.cli.hub import model_folder, model_name, with_folders
from headway.server.cli.inspection import ChatReport, ModelReport, inspect_folder
from headway.server.engine.inspector import EngineInspector

MAX_NAMES_SHOWN = 8


def inspect(
    config: InspectConfig,
    source: ModelSource,
    engine_config: EngineConfig,
    engine: EngineInspector,
    flags: list[str],
) -> int:
    """Returns the exit status. flags: those of the command line that `headway serve` needs, too.

    Raises ConfigError, ReaderGoneError, and ModelError for a model that is not on this machine.
    """
    if config.gpu_memory is not None and engine_config.device == "cpu":
        raise ConfigError("--gpu-memory names a GPU, but --device is cpu; leave one of the two out")
    folder = model_folder(source, may_download=False)
    report = inspect_folder(
        model_name(source),
        folder,
        engine,
        with_folders(engine_config, folder, may_download=False),
        gpu_memory_bytes=config.gpu_memory,
        template_file=None if config.chat_template is None else Path(config.chat_template),
        tool_format=config.tool_format,
    )
    show(_as_json(report) if config.json else _as_text(report, flags))
    return 0 if report.is_servable else NOT_SERVABLE


def _as_json(report: ModelReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def _as_text(report: ModelReport, flags: list[str]) -> str:
    model = report.model
    family = f", family {model.family}" if model.family is not None else ""
    lines = {"model": f"{report.name} ({model.architecture or 'no architecture'}{family})"}
    if model.shape is not None:
        lines["layers"] = "; ".join(map(_group, model.shape.layers))
    lines["weights"] = _weights(model)
    lines["mtp"] = _head(model.draft_head, model)
    lines["chat"] = _chat(report.chat)
    lines |= _device(model)
    table = "\n".join(f"  {name:<8} {value}" for name, value in lines.items())
    warnings = "".join(f"  warning: {warning}\n" for warning in report.warnings)
    problems = "".join(f"  problem: {problem}\n" for problem in report.problems)
    command = shlex.join(["headway", "serve", report.folder, *flags])
    verdict = f"can be served: {command}" if report.is_servable else "cannot be served"
    return f"{table}\n{warnings}{problems}  {verdict}\n"


def _group(group: LayerGroup) -> str:
    """Returns, for example: 36 attention (num_heads 32, num_kv_heads 8, head_dim 128) with dense
    (intermediate_size 11,008)"""
    return f"{group.num_layers} {_part(group.mixer)} with {_part(group.feed_forward)}"


def _part(fields: dict[str, object]) -> str:
    """Leaves out fields that are no sizes: switches, and the specs of norms and positions."""
    sizes = [f"{name} {value:,}" for name, value in fields.items() if type(value) is int]
    return f"{fields['kind']} ({', '.join(sizes)})"


def _weights(model: Inspection) -> str:
    parts = [] if model.num_parameters is None else [f"{readable_count(model.num_parameters)} parameters"]
    if model.num_active_parameters is not None and _has_experts(model):
        parts.append(f"{readable_count(model.num_active_parameters)} of them active")
    if model.stored:
        kinds = ", ".join(f"{readable_count(one.num_elements)} {one.dtype}" for one in model.stored)
        size = readable_size(sum(one.num_bytes for one in model.stored))
        parts.append(f"stored: {kinds} in {sum(one.num_tensors for one in model.stored):,} tensors, {size}")
    if model.quantization is not None:
        expanded = f", {model.num_expanded:,} weights are expanded" if model.num_expanded else ""
        parts.append(f"quantized ({model.quantization}){expanded}")
    if model.memory is not None:
        copies = model.memory.expanded_bytes
        beside = f", and {readable_size(copies)} of expanded copies" if copies else ""
        size = readable_size(model.memory.weights_bytes)
        parts.append(f"served as {model.memory.dtype}, {size}{beside}{_each(model)}")
    return "; ".join(parts) or "no tensors could be read"


def _each(model: Inspection) -> str:
    """Returns the remark on sizes that hold for every rank."""
    num_ranks = 1 if model.engine is None else model.engine.num_ranks
    return f" on each of {num_ranks} ranks" if num_ranks > 1 else ""


def _has_experts(model: Inspection) -> bool:
    layers = () if model.shape is None else model.shape.layers
    return any(group.feed_forward["kind"] == "experts" for group in layers)


def _head(head: HeadReport, model: Inspection) -> str:
    layers = f"{head.num_layers} layer{'s' if head.num_layers != 1 else ''}"
    if head.state == "none":
        return f"no head: {head.reason}"
    size = "" if head.num_parameters is None else f", {readable_count(head.num_parameters)} parameters"
    told = f"{head.state}: {layers}{size}" if head.num_layers else head.state
    if head.num_stored_tensors:
        told += f", {head.num_stored_tensors} tensors in {', '.join(head.prefixes[:MAX_NAMES_SHOWN])}"
    if head.reason is not None:
        told += f"; not loaded: {head.reason}" if not head.is_loaded else f"; {head.reason}"
    if head.state == "incomplete":
        shown, hidden = head.missing_tensors[:MAX_NAMES_SHOWN], head.missing_tensors[MAX_NAMES_SHOWN:]
        told += f": {', '.join(shown)}" + (f" and {len(hidden)} more" if hidden else "")
    if head.is_loaded and model.engine is not None:
        told += f"; {'up to ' if model.engine.chooses_depth else ''}{model.engine.depth} drafts a round"
    return told


def _chat(chat: ChatReport | None) -> str:
    if chat is None:
        return "unknown: the tokenizer's files cannot be read"
    if not chat.has_template:
        return "no template"
    calls = f"tools in the form {chat.tool_format}" if chat.has_calls else "no known form of tools"
    thinking = "" if chat.thinking is None else f", reasoning between {' and '.join(chat.thinking)}"
    template = "a template, one of its own for tools" if chat.has_tool_template else "a template"
    return f"{template}; {calls}{thinking}" + (f"; {chat.note}" if chat.note else "")


def _device(model: Inspection) -> dict[str, str]:
    """Returns the lines on the device, on memory and on the floor, as far as these are known."""
    lines, device, memory, floor, engine = {}, model.device, model.memory, model.floor, model.engine
    if device is not None:
        name = "" if device.name is None else f" ({device.name})"
        lines["device"] = f"{device.kind}{name}, {readable_size(device.available_bytes)} available"
    each = _each(model)
    if memory is not None:
        state = (
            f", {readable_size(memory.row_state_bytes)} of it recurrent state"
            if memory.row_state_bytes
            else ""
        )
        lines["memory"] = (
            f"{readable_size(memory.token_bytes)} a token, {readable_size(memory.request_bytes)} a request of "
            f"{memory.max_model_len:,} tokens{state}{each}"
        )
    if memory is not None and engine is not None:
        lines["fits"] = (
            f"{engine.num_blocks * engine.block_size:,} tokens in all: {memory.num_full_requests:,} requests of "
            f"{memory.max_model_len:,} tokens, up to {engine.max_running:,} shorter ones at once"
        )
    if floor is not None:
        read = "weights and recurrent state" if memory is not None and memory.row_state_bytes else "weights"
        lines["floor"] = _floor(
            floor.depth,
            floor.round_bytes,
            floor.round_seconds,
            None if device is None else device.read_bytes_a_second,
            read=read,
        )
        if floor.depth:
            lines["floor"] += "; " + _floor(
                0, floor.round_bytes_without_drafts, floor.round_seconds_without_drafts, None, read=read
            )
        lines["floor"] += each
    return lines


def _floor(depth: int, num_bytes: int, seconds: float | None, speed: float | None, *, read: str) -> str:
    """Returns, for example: 14.7 GiB of weights a round with 3 drafts, 3.3 ms at 4.8 TB/s"""
    drafts = f"with {depth} drafts" if depth else "without drafts"
    time = "" if seconds is None else f", {1000 * seconds:.2f} ms"
    at = "" if speed is None else f" at {speed / 1e12:.2f} TB/s"
    return f"{readable_size(num_bytes)} of {read} a round {drafts}{time}{at}"
