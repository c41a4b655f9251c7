"""Resolves all options for one model on one device, and divides the memory.

It has no side effects: a start resolves its configuration before the weights are loaded, by config.json, and
again with the memory that they leave; an inspection resolves it for a model of which nothing is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headway.engine.defaults import num_threads, prefill_policy, with_rows
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.group import ALONE, Group
from headway.engine.loading.headers import dtype_name, dummy_dtype, outline_of, parameter_counts
from headway.engine.models.spec import ModelSpec
from headway.engine.options import (
    check_audit,
    check_cpu_weights,
    check_deterministic,
    check_logits_processors,
    check_ranks,
    check_recurrence,
    check_relaxed_thinking,
    draft_maker,
    has_ordered_sums,
    with_drafter,
    with_formats,
)
from headway.engine.outline import DeviceFacts, Outline
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import EngineInfo
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.speculation.select import drafter_state, max_pending
from headway.engine.state.masks import mask_bytes
from headway.engine.state.memory import (
    fitting_tokens,
    format_bytes,
    held_model_len,
    num_checkpoints,
    num_kv_blocks,
    spare_bytes,
    wanted_model_len,
)
from headway.engine.state.pool import NUM_SPARE_ENTRIES
from headway.engine.state.processors import table_bytes
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import PagedSpec, StateSpec, block_bytes, row_bytes, scratch_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with all options resolved, and the sizes of all that is allocated.

    config: its max_model_len fits into the pool for one request. layers, draft_layers: the state of each
    layer of both models; drafter_state: the further state of the drafter. weights_bytes: the loaded
    parameters; draft_bytes: the formats of drafts, less what they replace; expanded_bytes: expanded copies of
    quantised weights; rows_bytes: at most the tables and the scratch of all rows; steps_bytes: the memory
    reserved for steps and graphs on a GPU, 0 on a CPU. num_blocks: 0 if not one request fits, which only an
    inspection sees.
    """

    config: EngineConfig
    outline: Outline
    prefill: PrefillPolicy
    layers: tuple[tuple[StateSpec, ...], ...]
    draft_layers: tuple[tuple[StateSpec, ...], ...]
    drafter_state: tuple[StateSpec, ...]
    num_parameters: int
    weights_bytes: int
    draft_bytes: int
    expanded_bytes: int
    rows_bytes: int
    steps_bytes: int
    num_blocks: int
    num_checkpoints: int

    @property
    def max_model_len(self) -> int:
        """Returns the most context in tokens that is served."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def states(self) -> tuple[tuple[StateSpec, ...], ...]:
        """Returns all state of the pool."""
        return (*self.layers, *self.draft_layers, self.drafter_state)

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block in all layers and of the drafter."""
        return block_bytes(self.states, self.config.block_size)

    @property
    def row_state_bytes(self) -> int:
        """Returns the bytes of a row's state that layers declare and checkpoints hold."""
        return row_bytes(self.states)


def announced(
    config: EngineConfig, spec: ModelSpec, facts: DeviceFacts, available: int, group: Group = ALONE
) -> Outline:
    """Describes a model, or a rank's share of it, by its config.json only. The dtype auto on a GPU counts as
    bfloat16: the weights may have another one, but 16 bits take the least memory and allow all options.
    Raises ConfigError."""
    dtype, make_draft = dummy_dtype(config.dtype, facts.device), draft_maker(config, spec)
    check_ranks(config, spec, make_draft)
    models = outline_of(spec, dtype, make_draft, group=group)
    return Outline(models, facts, available, counts_weights=False)


def resolve(
    config: EngineConfig,
    outline: Outline,
    noted: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    steps_bytes: int | None = None,
) -> Resolved:
    """Resolves the configuration. Raises ConfigError if it cannot be served.

    noted: each check runs in such a context, which may catch its error, so that an inspection continues.
    steps_bytes: the most GPU memory of steps and graphs besides all that is counted; None: it is estimated.
    """
    models, facts = outline.models, outline.facts
    config = with_drafter(config, has_head=models.draft is not None or config.depth == 0)
    config = with_formats(config, outline)
    for check in (check_cpu_weights, check_deterministic, check_audit, check_recurrence):
        with noted():
            check(config, outline)
    num_parameters, weights_bytes = parameter_counts(models)
    with noted():
        check_relaxed_thinking(config)
    draft_bytes = 0
    draft_layers: tuple[tuple[StateSpec, ...], ...] = ()
    if models.draft is not None:
        draft_bytes = models.draft.added_bytes(config.draft_lm_head, config.draft_layers)
        draft_layers = models.draft.state(config.depth + 1)
    expanded_bytes = outline.expanded_bytes if config.expanded_weights else 0
    left = outline.available - (draft_bytes if outline.counts_weights else 0) - expanded_bytes
    prefill = prefill_policy(config, outline, left)
    default_threads = None
    if facts.device.type == "cpu":
        default_threads = num_threads(models.active_weights, facts.num_threads)
    config = msgspec.structs.replace(
        with_rows(config, outline, left),
        dtype=dtype_name(outline.dtype),
        mixed_above_tokens=prefill.mixed_above_tokens,
        threads=config.threads or default_threads,
    )
    with noted():
        check_logits_processors(config, outline, left)
    layers, of_drafter = outline.model.state(config.depth + 1), drafter_state(config, models)
    # Only the weights say whether a head that config.json announces is missing.
    kept = (*layers, *draft_layers, of_drafter) if outline.counts_weights else layers
    steps_bytes = _kept_bytes(config, outline, prefill, kept, left, steps_bytes)
    parts = _divide(config, outline, kept, left - steps_bytes, noted)
    return Resolved(
        msgspec.structs.replace(config, max_model_len=parts.max_model_len),
        outline,
        prefill,
        layers,
        draft_layers,
        of_drafter,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        draft_bytes=draft_bytes,
        expanded_bytes=expanded_bytes,
        rows_bytes=parts.rows_bytes,
        steps_bytes=steps_bytes,
        num_blocks=parts.num_blocks,
        num_checkpoints=parts.num_checkpoints,
    )


def _kept_bytes(
    config: EngineConfig,
    outline: Outline,
    prefill: PrefillPolicy,
    states: tuple[tuple[StateSpec, ...], ...],
    available: int,
    measured: int | None,
) -> int:
    """Returns the bytes that are reserved for steps and graphs. On a CPU the KV cache takes only a share of
    the memory instead. measured: the most that they take; None: it is estimated."""
    if outline.device.type != "cuda":
        return 0
    if measured is None:
        size = block_bytes(states, config.block_size)
        fitting = max(fitting_tokens(config, block_bytes=size, available=available), config.block_size)
        measured = outline.estimated_steps_bytes(
            num_rows=config.num_rows,
            depth=config.depth,
            most_prompt_tokens=prefill.most_tokens,
            max_model_len=min(wanted_model_len(config, outline.spec), fitting),
        )
    return measured + spare_bytes(available)


class _Parts(NamedTuple):
    """The parts into which the memory beside the weights is divided. See Resolved."""

    max_model_len: int
    rows_bytes: int
    num_blocks: int
    num_checkpoints: int


def _divide(
    config: EngineConfig,
    outline: Outline,
    states: tuple[tuple[StateSpec, ...], ...],
    available: int,
    noted: Callable[[], AbstractContextManager[None]],
) -> _Parts:
    """Divides the memory. available: the bytes that weights in all formats and steps leave."""
    wanted, num_blocks = wanted_model_len(config, outline.spec), 0
    bytes_of_block, bytes_of_row = block_bytes(states, config.block_size), row_bytes(states)
    most = available - (config.num_rows + NUM_SPARE_ENTRIES) * bytes_of_row
    # The tables of a context that is cut or refused are no longer than what would fit without them.
    fitting = max(fitting_tokens(config, block_bytes=bytes_of_block, available=most), config.block_size)
    rows_bytes = _rows_bytes(config, outline, min(wanted, fitting)) + config.num_rows * scratch_bytes(states)
    available -= rows_bytes
    with noted():
        num_blocks = num_kv_blocks(
            config,
            max_model_len=wanted,
            block_bytes=bytes_of_block,
            available=available,
            row_bytes=bytes_of_row,
        )
    held = held_model_len(wanted, num_blocks=num_blocks, block_size=config.block_size)
    copies = num_checkpoints(config, row_bytes=bytes_of_row, available=available)
    return _Parts(held if num_blocks > 0 else wanted, rows_bytes, num_blocks, copies)


def _rows_bytes(config: EngineConfig, outline: Outline, max_model_len: int) -> int:
    """Returns the bytes that rows take besides the pool. A CPU allocates logits processors at their first
    use, and keeps no logits for graphs."""
    vocab_size = outline.spec.vocab_size
    columns = take_rows(config, outline.model, max_model_len).tensors().values()
    num_bytes = sum(column.nbytes for column in columns)
    num_bytes += mask_bytes(config.num_rows, config.depth + 1, vocab_size)
    if outline.device.type != "cuda":
        return num_bytes
    kept_logits = config.num_rows * (config.depth + 1) * vocab_size * outline.dtype.itemsize
    return num_bytes + kept_logits + table_bytes(config.num_rows, vocab_size)


def take_rows(config: EngineConfig, model: CausalLM, max_model_len: int) -> RowTensors:
    """Allocates the state of requests on the model's device. The configuration names its drafter."""
    return RowTensors.allocate(
        config.num_rows,
        max_blocks=-(-max_model_len // config.block_size),
        max_pending=max_pending(config),
        device=model.device,
    )


def warn_of_cut_context(config: EngineConfig, spec: ModelSpec, resolved: Resolved) -> None:
    """Logs that the context is shorter than that of the model. config, spec: those before anything was
    resolved. Raises ConfigError if the wanted context is longer than that of the model."""
    length, wanted = resolved.max_model_len, wanted_model_len(config, spec)
    if length < wanted:
        blocks = -(-wanted // resolved.config.block_size) + 1
        logger.warning(
            "the context is %s tokens, as many as fit: the model's %s would take %s of KV cache; a larger --kv-cache-memory or a "
            "narrower --dtype may allow more, and --max-model-len %d serves as many without this warning",
            f"{length:,}",
            f"{wanted:,}",
            format_bytes(blocks * resolved.block_bytes),
            length,
        )


def engine_info(resolved: Resolved) -> EngineInfo:
    """Returns the facts about the engine for the server."""
    config, spec = resolved.config, resolved.outline.spec
    paged = (spec for specs in resolved.states for spec in specs if isinstance(spec, PagedSpec))
    num_ranks = resolved.outline.model.group.size
    num_parameters, weights_bytes = resolved.num_parameters, resolved.weights_bytes
    if num_ranks > 1:
        num_parameters, weights_bytes = parameter_counts(resolved.outline.models.outline(ALONE))
    return EngineInfo(
        architecture=spec.architecture,
        device=config.device,
        dtype=config.dtype,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        kv_cache_bytes=num_ranks
        * resolved.num_blocks
        * sum(one.block_bytes(config.block_size) for one in paged),
        num_blocks=resolved.num_blocks,
        block_size=config.block_size,
        max_model_len=resolved.max_model_len,
        max_running=config.num_rows,
        vocab_size=spec.vocab_size,
        depth=config.depth,
        chooses_depth=config.chooses_depth and config.depth > 0,
        has_draft_head=resolved.outline.has_draft_head,
        drafter=config.drafter,
        has_dummy_weights=config.load_format == "dummy",
        synthetic_acceptance=config.synthetic_acceptance,
        relaxed_thinking=config.relaxed_thinking,
        draft_lm_head=config.draft_lm_head,
        draft_layers=config.draft_layers,
        cpu_weights=config.cpu_weights,
        is_deterministic=has_ordered_sums(config, resolved.outline) and config.relaxed_thinking is None,
        num_ranks=num_ranks,
    )
