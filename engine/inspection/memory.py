"""Divides a device's memory as a start does, for a model of which nothing is loaded, and tells what every
round must read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.engine.bench.floor import costs_of
from headway.engine.build import engine_info, kept_state, served_model_len, take_pool, take_rows
from headway.engine.defaults import Outline, with_rows
from headway.engine.inspection.device import Device
from headway.engine.inspection.problems import Problems
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.loading.headers import check_memory, parameter_counts
from headway.engine.options import check_adjustments, check_deterministic, with_drafter, with_formats
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.inspection import FloorReport, MemoryReport
from headway.engine.protocol.messages import EngineInfo
from headway.engine.speculation.select import warn_without_head
from headway.engine.state.masks import mask_bytes
from headway.engine.state.processors import table_bytes
from headway.engine.state.specs import block_bytes, row_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """memory, floor: None where the options do not fit the model. info: of an engine that would start."""

    memory: MemoryReport | None = None
    floor: FloorReport | None = None
    info: EngineInfo | None = None


def size_up(
    config: EngineConfig, outline: CausalLM, device: Device, max_model_len: int, problems: Problems
) -> Sizes:
    """Takes the steps of `assemble` in their order. outline: on the device meta. problems: gets the first
    step that fails."""
    facts = Outline(outline.spec, device.place, outline.dtype, outline.has_draft_head, device.has_float8)
    resolved = None
    with problems.noted():
        warn_without_head(config, has_head=outline.has_draft_head)
        config = with_drafter(config, has_head=outline.has_draft_head or config.depth == 0)
        resolved = with_formats(config, facts)
    if resolved is None:
        return Sizes()
    with problems.noted():
        check_deterministic(resolved, facts)
    memory, info = _divide(resolved, outline, facts, device, max_model_len, problems)
    return Sizes(memory, _floor(resolved, outline, device), info)


def _divide(
    config: EngineConfig,
    outline: CausalLM,
    facts: Outline,
    device: Device,
    max_model_len: int,
    problems: Problems,
) -> tuple[MemoryReport, EngineInfo | None]:
    """config: with a drafter and formats."""
    left = device.report.available_bytes
    with problems.noted():
        check_memory(Path(config.model_path), outline, left, device.place)
    num_parameters, weights_bytes = parameter_counts(outline)
    head = outline.draft_head
    draft_bytes = 0 if head is None else head.added_bytes(config.draft_lm_head, config.draft_layers)
    left -= weights_bytes + outline.rotary_bytes + draft_bytes
    config = with_rows(config, facts, left)
    with problems.noted():
        check_adjustments(config, facts, left)
    rows_bytes = _rows_bytes(config, outline, max_model_len, device)
    layers, drafter = kept_state(config, outline)
    states = (*layers, drafter)
    bytes_of_block = block_bytes(states, config.block_size)
    info = None
    with problems.noted():
        pool = take_pool(config, outline, max_model_len, left - rows_bytes)
        max_model_len = served_model_len(config, pool, max_model_len)
        info = engine_info(config, outline, pool, max_model_len, num_parameters, weights_bytes)
    blocks_of_request = -(-max_model_len // config.block_size)
    num_full = None if info is None else min(info.num_blocks // blocks_of_request, info.max_running)
    memory = MemoryReport(
        dtype=str(outline.dtype).removeprefix("torch."),
        weights_bytes=weights_bytes,
        draft_weights_bytes=draft_bytes,
        rotary_bytes=outline.rotary_bytes,
        rows_bytes=rows_bytes,
        row_state_bytes=row_bytes(states),
        block_bytes=bytes_of_block,
        token_bytes=bytes_of_block / config.block_size,
        max_model_len=max_model_len,
        request_bytes=blocks_of_request * bytes_of_block + row_bytes(states),
        num_full_requests=num_full,
    )
    return memory, info


def _rows_bytes(config: EngineConfig, outline: CausalLM, max_model_len: int, device: Device) -> int:
    """Returns the bytes that are taken for rows before the pool. A CPU takes the logits processors' when they
    are first used."""
    vocab_size = outline.spec.vocab_size
    columns = take_rows(config, outline, max_model_len).tensors().values()
    num_bytes = sum(column.nbytes for column in columns)
    num_bytes += mask_bytes(config.num_rows, config.depth + 1, vocab_size)
    return num_bytes + (table_bytes(config.num_rows, vocab_size) if device.place.type == "cuda" else 0)


def _floor(config: EngineConfig, outline: CausalLM, device: Device) -> FloorReport:
    """config: with a drafter and formats."""
    costs = costs_of(
        outline.spec,
        outline.dtype,
        has_draft_head=outline.has_draft_head,
        draft_lm_head=config.draft_lm_head,
        draft_layers=config.draft_layers,
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
