"""Computes how a device's memory is divided for a model of which nothing is loaded, and how many bytes every
round must read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.engine.bench.floor import costs_of
from headway.engine.inspection.device import Device
from headway.engine.inspection.problems import Problems
from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading.headers import check_memory, parameter_counts
from headway.engine.models.spec import ModelSpec
from headway.engine.outline import Outline
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.inspection import FloorReport, MemoryReport
from headway.engine.protocol.messages import EngineInfo
from headway.engine.resolve import Resolved, engine_info, resolve, warn_of_cut_context
from headway.engine.speculation.select import warn_without_head


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an inspected model. memory, floor: None if the options do not fit the model. info: the
    facts about an engine that would start."""

    memory: MemoryReport | None = None
    floor: FloorReport | None = None
    info: EngineInfo | None = None


def size_up(
    config: EngineConfig,
    spec: ModelSpec,
    outline: ModelPair,
    device: Device,
    problems: Problems,
    *,
    saved_bytes: int,
    expanded_bytes: int,
) -> Sizes:
    """Resolves the configuration as a start does once the weights are loaded. spec: that of config.json.
    outline: the models without memory, with the served context and the share of one rank. problems: gets the
    first one that is found. saved_bytes: the bytes that quantised weights save against the outline's;
    expanded_bytes: see Outline."""
    warn_without_head(config, has_head=outline.draft is not None)
    available = device.bytes_of_rank(config.tensor_parallel_size)
    with problems.noted():
        check_memory(
            Path(config.model_path), outline, available, device.facts.device, saved_bytes=saved_bytes
        )
    left = available + saved_bytes - parameter_counts(outline)[1] - outline.target.rotary_bytes
    if config.max_model_len is not None:
        config = msgspec.structs.replace(config, max_model_len=outline.target.spec.max_position_embeddings)
    with problems.noted():
        resolved = resolve(
            config, Outline(outline, device.facts, left, expanded_bytes=expanded_bytes), problems.noted
        )
        if resolved.num_blocks > 0:
            warn_of_cut_context(config, spec, resolved)
        info = engine_info(resolved) if resolved.num_blocks > 0 else None
        return Sizes(_memory(resolved), _floor(resolved, device), info)
    return Sizes()


def _memory(resolved: Resolved) -> MemoryReport:
    config = resolved.config
    blocks_of_request = -(-resolved.max_model_len // config.block_size)
    num_full = min(resolved.num_blocks // blocks_of_request, config.num_rows) or None
    return MemoryReport(
        dtype=config.dtype,
        weights_bytes=resolved.weights_bytes,
        draft_weights_bytes=resolved.draft_bytes,
        expanded_bytes=resolved.expanded_bytes,
        rotary_bytes=resolved.outline.model.rotary_bytes,
        rows_bytes=resolved.rows_bytes,
        steps_bytes=resolved.steps_bytes,
        row_state_bytes=resolved.row_state_bytes,
        block_bytes=resolved.block_bytes,
        token_bytes=resolved.block_bytes / config.block_size,
        max_model_len=resolved.max_model_len,
        request_bytes=blocks_of_request * resolved.block_bytes + resolved.row_state_bytes,
        num_full_requests=num_full,
    )


def _floor(resolved: Resolved, device: Device) -> FloorReport:
    config = resolved.config
    costs = costs_of(
        resolved.outline.models, draft_lm_head=config.draft_lm_head, draft_layers=config.draft_layers
    )
    with_drafts, without = (
        int(costs.round_bytes(batch=1, depth=depth, context=0)) for depth in (config.depth, 0)
    )
    speed = device.report.read_bytes_a_second
    return FloorReport(
        depth=config.depth,
        round_bytes=with_drafts,
        round_bytes_without_drafts=without,
        round_seconds=None if speed is None else with_drafts / speed,
        round_seconds_without_drafts=None if speed is None else without / speed,
    )
