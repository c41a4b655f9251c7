"""Builds an engine from its configuration: device, model, memory, table of rows, scheduler and runner."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from headway.engine.execution.commands import Command, tell_nobody
from headway.engine.execution.runner import Runner
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.group import Group
from headway.engine.layers.linear import Kind
from headway.engine.layers.model_pair import ModelPair
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.drafter import load_drafter
from headway.engine.models.registry import read_model_spec
from headway.engine.options import has_ordered_sums, head_maker
from headway.engine.outline import DeviceFacts, Outline, ranks_of_device, wanted_device
from headway.engine.parallel.group import ProcessGroup, group_of
from headway.engine.parallel.messages import Join
from headway.engine.parallel.ranks import Ranks
from headway.engine.protocol.config import EngineConfig, Quantize
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.protocol.logs import log_seconds
from headway.engine.protocol.messages import EngineInfo
from headway.engine.resolve import Resolved, announced, engine_info, resolve, take_rows, warn_of_cut_context
from headway.engine.scheduling.depth.costs import CostTable
from headway.engine.scheduling.depth.policy import DepthPolicy
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.relaxed import RelaxedAcceptance
from headway.engine.speculation.select import check_of_missing_head, new_drafter, warn_without_head
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.masks import MaskTable
from headway.engine.state.memory import available_bytes, format_bytes, keep_freed_memory
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import LogitsProcessorTable
from headway.engine.state.specs import PagedSpec
from headway.kernels import WIDE_CACHE_SIZE, keep_sums_whole

_MEASURED_BLOCKS = 16  # of the KV cache while steps are tried; their rows use none
_SHARE_OF_TARGET = 0.9  # of the progress of loading, where a drafter is loaded after it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """The scheduler, the runner and the facts about the engine. ranks: the other ranks of the model, which
    the owner of the engine closes; None: there are none."""

    scheduler: Scheduler
    runner: Runner
    info: EngineInfo
    ranks: Ranks | None = None


def assemble(
    config: EngineConfig,
    *,
    progress: Callable[[float], None],
    drafter: Drafter | None = None,
    measuring: Callable[[float], None] = lambda _: None,
) -> Engine:
    """Loads the model and allocates all memory. Raises ModelError or ConfigError.

    progress: called with the loaded share. drafter: replaces the drafter that the configuration names.
    measuring: called a few times a second with the finished share while steps are tried on a GPU.
    """
    facts = _facts(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _warn_of_the_text(config)
    spec = read_model_spec(config.model_path)
    size = config.tensor_parallel_size
    group = group_of(size)
    available = _available(config, facts)
    # A model is not refused for the memory of steps before that memory is measured.
    early = resolve(config, announced(config, spec, facts, available, group), steps_bytes=0)
    with ExitStack() as taken:
        ranks = None if size == 1 else Ranks(config, available)
        if ranks is not None:
            taken.callback(ranks.close)
        with log_seconds("loading weights"):
            models = _load(config, early, progress, group)
            if ranks is not None and isinstance(group, ProcessGroup):
                assert drafter is None, "every rank makes its own drafter"
                ranks.wait_until_loaded()
                ranks.connect(group, facts.device)
        resolved = _resolved(config, facts, models, drafter, measuring)
        warn_of_cut_context(config, spec, resolved)
        with log_seconds("taking memory"):
            runner = build_device(
                resolved, models, drafter, tell=tell_nobody if ranks is None else ranks.tell
            )
        taken.pop_all()
    info = msgspec.structs.replace(engine_info(resolved), draft_check=check_of_missing_head(config, models))
    return Engine(build_host(resolved), runner, info, ranks)


def load_rank(join: Join, progress: Callable[[float], None]) -> ModelPair:
    """Loads the share of a rank that is not the first, by the steps of `assemble` in their order. Raises
    ModelError or ConfigError."""
    config, facts = join.config, _facts(join.config, join.rank)
    group = group_of(config.tensor_parallel_size, join.rank)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    outline = announced(config, read_model_spec(config.model_path), facts, join.available, group)
    return _load(config, resolve(config, outline, steps_bytes=0), progress, group)


def build_rank(join: Join, models: ModelPair) -> Runner:
    """Connects the rank with the others, which connect at the same time, and allocates its memory. Raises
    ModelError, ConfigError and RankError."""
    group, facts = models.target.group, _facts(join.config, join.rank)
    assert isinstance(group, ProcessGroup), "the models were loaded by a rank"
    group.connect(Path(join.folder), facts.device)
    return build_device(_resolved(join.config, facts, models), models)


def _facts(config: EngineConfig, rank: int = 0) -> DeviceFacts:
    """Returns the facts about the rank's device, and makes it the current one. Raises ConfigError."""
    device = wanted_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = DeviceFacts.of(device)
    return replace(facts, num_threads=max(1, facts.num_threads // config.tensor_parallel_size))


def _available(config: EngineConfig, facts: DeviceFacts) -> int:
    """Returns the bytes of its device that a rank can allocate. Raises ConfigError."""
    return available_bytes(facts.device) // ranks_of_device(config, facts.device)


def _resolved(
    config: EngineConfig,
    facts: DeviceFacts,
    models: ModelPair,
    drafter: Drafter | None = None,
    measuring: Callable[[float], None] = lambda _: None,
) -> Resolved:
    """Prepares the loaded models and resolves the configuration by the memory that they leave. All connected
    ranks come to the same result. Raises ConfigError."""
    group = models.target.group
    available = -group.largest(-_available(config, facts))
    loaded = Outline.of_loaded(models, facts, available)
    measures = facts.device.type == "cuda" and config.kv_cache_memory_bytes is None
    resolved = resolve(config, loaded, steps_bytes=0 if measures else None)
    with log_seconds("choosing formats and kernels"):
        prepare_models(resolved, models)
    if measures:
        with log_seconds("compiling and trying steps"):
            steps_bytes = group.largest(measured_steps_bytes(resolved, models, drafter, measuring))
        resolved = resolve(config, loaded, steps_bytes=steps_bytes)
    return resolved


def prepare_models(resolved: Resolved, models: ModelPair) -> None:
    """Converts the loaded weights to their formats, once, and makes the settings that products depend on."""
    config, model = resolved.config, models.target
    if models.draft is not None:
        models.draft.choose_formats(config.draft_lm_head, config.draft_layers)
    if model.device.type == "cpu":
        keep_freed_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
    elif has_ordered_sums(config, resolved.outline):
        order_sums(model)
    drafts = () if models.draft is None else models.draft.linears()
    for linear in (*drafts, *(model.linears() if config.fast_math else ())):
        linear.trust_library()
    if resolved.expanded_bytes > 0:
        logger.info("expanded copies of quantized weights take %s", format_bytes(resolved.expanded_bytes))
        for linear in models.linears():
            linear.keep_expanded()


def measured_steps_bytes(
    resolved: Resolved, models: ModelPair, drafter: Drafter | None, progress: Callable[[float], None]
) -> int:
    """Returns the GPU memory that steps, graphs and libraries take besides what is counted elsewhere. It is
    measured with a KV cache of few blocks, all of which is freed. Compiles the kernels. Raises
    ConfigError."""
    few = replace(resolved, num_blocks=_tried_blocks(resolved))
    of_steps = build_device(few, models, drafter, is_tried=True).measured_bytes(
        range(resolved.config.depth + 1), progress=progress
    )
    gc.collect()
    # The formats may take more or less than was counted, and the memory of libraries and loaded kernels stays
    # taken.
    left = resolved.outline.available - resolved.draft_bytes - resolved.expanded_bytes
    lost = left - available_bytes(models.target.device)
    logger.info(
        "the largest steps and all graphs take %s, libraries and kernels %s",
        format_bytes(of_steps),
        format_bytes(max(0, lost)),
    )
    return max(0, of_steps + lost)


def _tried_blocks(resolved: Resolved) -> int:
    """Returns the number of blocks with which steps are tried: few, but so many that kernels use the same
    index type as for the whole cache. Otherwise other kernels would have to be compiled later."""
    size, most = resolved.config.block_size, resolved.num_blocks
    paged = (spec for specs in resolved.states for spec in specs if isinstance(spec, PagedSpec))
    wide = (-(-WIDE_CACHE_SIZE // spec.num_elements(size)) for spec in paged)
    return max((n for n in wide if n <= most), default=min(most, _MEASURED_BLOCKS))


def build_device(
    resolved: Resolved,
    models: ModelPair,
    drafter: Drafter | None = None,
    *,
    is_tried: bool = False,
    tell: Callable[[Command], None] = tell_nobody,
) -> Runner:
    """Allocates the device memory of a rank and makes its runner. models: prepared ones.

    drafter: see `assemble`. is_tried: see StatePool. tell: see Runner.
    """
    config, model = resolved.config, models.target
    device, vocab_size = model.device, model.spec.vocab_size
    # These and the rows are allocated before the pool, which takes most of the rest.
    processors = LogitsProcessorTable(config.num_rows, vocab_size, device)
    masks = MaskTable(config.num_rows, config.depth + 1, vocab_size, device)
    rows = take_rows(config, model, resolved.max_model_len)
    pool = StatePool(
        resolved.layers,
        resolved.drafter_state,
        draft_layers=resolved.draft_layers,
        num_blocks=resolved.num_blocks,
        num_rows=config.num_rows,
        num_checkpoints=resolved.num_checkpoints,
        block_size=config.block_size,
        device=device,
        is_tried=is_tried,
    )
    rates, rule = config.synthetic_acceptance, config.relaxed_thinking
    return Runner(
        model,
        pool,
        rows,
        drafter or new_drafter(config, models, pool, rows),
        max_depth=config.depth,
        processors=processors,
        masks=masks,
        synthetic=None if rates is None else SyntheticAcceptance.of_rates(rates, vocab_size, device),
        relaxed=None if rule is None else RelaxedAcceptance.of_rule(rule, config.num_rows, device),
        prefill=resolved.prefill,
        tell=tell,
    )


def build_host(resolved: Resolved) -> Scheduler:
    """Makes the scheduler. There is one, whatever the number of ranks."""
    return Scheduler(
        resolved.config,
        num_blocks=resolved.num_blocks,
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.outline.spec.vocab_size,
        drafter=DRAFTER_TRAITS[resolved.config.drafter],
        prefill=resolved.prefill,
        num_checkpoints=resolved.num_checkpoints if resolved.row_state_bytes > 0 else None,
        prompt_grid=resolved.outline.spec.prompt_grid,
    )


def measured_policy(engine: Engine) -> DepthPolicy:
    """Measures the rounds of an engine with drafts, before the first request. Returns the depth policy with
    these times."""
    max_depth, runner = engine.info.depth, engine.runner
    measured, catch_ups = runner.measure_rounds(range(max_depth + 1)), runner.measure_catch_ups()
    return DepthPolicy(CostTable(runner.row_counts, max_depth, measured, catch_ups), max_depth)


def _warn_of_the_text(config: EngineConfig) -> None:
    if config.load_format == "dummy":
        logger.warning("the weights are random (--load-format dummy): the text means nothing")
    if config.synthetic_acceptance is not None:
        logger.warning(
            "drafts are accepted at set rates, whatever they are (--synthetic-acceptance): the text means nothing"
        )
    if config.relaxed_thinking is not None:
        logger.warning(
            "LOSSY: while a request reasons, drafts that the model does not choose are accepted (--relaxed-thinking %d,%g)",
            *config.relaxed_thinking,
        )


def _load(
    config: EngineConfig, early: Resolved, progress: Callable[[float], None], group: Group
) -> ModelPair:
    make_model = make_dummy_model if config.load_format == "dummy" else load_model
    drafter = config.drafter_path if config.depth > 0 else None
    of_target = 1.0 if drafter is None else _SHARE_OF_TARGET
    models = make_model(
        config.model_path,
        device=early.outline.device,
        dtype=config.dtype,
        make_draft=head_maker(config, early.outline.spec),
        progress=lambda share: progress(share * of_target),
        max_model_len=early.max_model_len,
        group=group,
        quantize=Quantize(config.quantize, config.quantize_lm_head),
        cpu_weights=early.config.cpu_weights,
    )
    if drafter is not None:
        models = load_drafter(
            Path(drafter),
            models,
            lambda share: progress(of_target + share * (1 - of_target)),
            is_dummy=config.load_format == "dummy",
            cpu_weights=early.config.cpu_weights,
            taps=config.drafter_taps,
        )
    warn_without_head(config, has_head=models.draft is not None)
    return models


def order_sums(model: CausalLM) -> None:
    """Makes all products that the text depends on batch-invariant on a GPU: each sums in one order for any
    number of rows. Tries for which products of many rows the library keeps that order.

    Attention, norms, activations and sampling compute each row by itself on every device; on a CPU products
    in float32 and float64 do so, too.
    """
    keep_sums_whole()
    tried: dict[Kind, bool] = {}
    for linear in model.linears():
        linear.order_sums(tried)
    for (shape, _), by_library in tried.items():
        computed_by = "the library" if by_library else "the project's kernels alone"
        logger.info("products with a weight of %d x %d: many rows by %s", *shape, computed_by)
    torch.cuda.empty_cache()
