"""Puts an engine together from its configuration: device, model, memory, slot table, scheduler, runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from headway.engine.defaults import max_extra_rows, max_running, num_threads, prefill_policy
from headway.engine.execution.runner import Runner
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.placement import Placement
from headway.engine.loading.checkpoint import NAMED_DTYPES, load_model, make_dummy_model, parameter_counts
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.options import (
    Outline,
    check_adjustments,
    check_deterministic,
    draft_layers_of,
    draft_lm_head_of,
    has_ordered_sums,
    with_drafter,
)
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.messages import EngineInfo
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.select import (
    drafter_state,
    max_pending,
    new_drafter,
    num_carries,
    reads_draft_head,
    warn_without_head,
)
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.masks import MaskTable
from headway.engine.state.memory import (
    available_bytes,
    check_context,
    keep_freed_memory,
    num_checkpoints,
    num_kv_blocks,
    served_model_len,
)
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import AdjustmentTable
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import StateSpec, block_bytes, row_bytes
from headway.kernels import keep_sums_whole, library_is_ordered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """All that the loop needs, and what was found out on the way."""

    scheduler: Scheduler
    runner: Runner
    info: EngineInfo


def assemble(
    config: EngineConfig, *, progress: Callable[[float], None], drafter: Drafter | None = None
) -> Engine:
    """Loads the model and takes the memory. Raises ModelError or ConfigError.

    progress: called with the share that is loaded. drafter: drafts instead of the one that the configuration names.
    """
    device = _device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _warn_of_meaningless_text(config)
    max_model_len = _max_model_len(config, device)
    model = _load(config, device, max_model_len, progress)
    config = with_drafter(config, has_head=model.has_draft_head or config.depth == 0)
    draft_lm_head, draft_layers = draft_lm_head_of(config, model), draft_layers_of(config, model)
    if model.draft_head is not None:
        model.draft_head.choose_formats(draft_lm_head, draft_layers)
    is_deterministic = _order_sums(config, model)
    num_parameters, weights_bytes = parameter_counts(model)
    if config.threads is None and device.type == "cpu":
        torch.set_num_threads(num_threads(num_parameters, torch.get_num_threads()))
    prefill = prefill_policy(config, model, num_parameters)
    config = msgspec.structs.replace(
        config,
        device=device.type,
        draft_lm_head=draft_lm_head,
        draft_layers=draft_layers,
        max_running=config.max_running or max_running(model, config.depth),
        max_extra_rows=config.max_extra_rows or max_extra_rows(device),
    )
    # These and the rows are taken before the pool takes most of what is left.
    adjustments = _take_adjustments(config, model)
    masks = MaskTable(config.num_rows, config.depth + 1, model.spec.vocab_size, device)
    slots = _take_rows(config, model, max_model_len)
    pool = _take_pool(config, model, max_model_len)
    if device.type == "cpu":
        keep_freed_memory()
    scheduler = _scheduler(config, model, pool, max_model_len, prefill)
    synthetic = _synthetic(config, model)
    runner = Runner(
        model,
        pool,
        slots,
        drafter or new_drafter(config, model, pool, slots),
        max_depth=config.depth,
        adjustments=adjustments,
        masks=masks,
        synthetic=synthetic,
        prefill=prefill,
    )
    info = _info(config, model, pool, max_model_len, num_parameters, weights_bytes)
    info = msgspec.structs.replace(info, is_deterministic=is_deterministic)
    return Engine(scheduler, runner, info)


def _warn_of_meaningless_text(config: EngineConfig) -> None:
    if config.load_format == "dummy":
        logger.warning("the weights are random (--load-format dummy): the text means nothing")
    if config.synthetic_acceptance is not None:
        logger.warning(
            "drafts are accepted at set rates, whatever they are (--synthetic-acceptance): the text means nothing"
        )


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device is cuda, but torch sees no CUDA device; use --device cpu or check the driver"
        )
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _max_model_len(config: EngineConfig, device: torch.device) -> int:
    """Raises ConfigError, before anything is loaded."""
    shape = read_model_spec(config.model_path)
    max_model_len = served_model_len(config, shape)
    least = _least_state(config, shape, device)
    check_context(
        config,
        max_model_len=max_model_len,
        block_bytes=block_bytes(least, config.block_size),
        row_bytes=row_bytes(least),
        device=device,
    )
    _check_options(config, shape, device)
    return max_model_len


def _least_state(
    config: EngineConfig, shape: ModelSpec, device: torch.device
) -> tuple[tuple[StateSpec, ...], ...]:
    """Returns what the layers keep without a draft head, in the narrowest dtype that the weights may turn out to have."""
    is_narrow = config.dtype in ("float16", "bfloat16") or (config.dtype == "auto" and device.type == "cuda")
    place = Placement(torch.device("meta"), torch.float16 if is_narrow else torch.float32)
    return CausalLM(shape, place, with_draft_head=False).state()


def _check_options(config: EngineConfig, shape: ModelSpec, device: torch.device) -> None:
    """Judges by the outline what is judged once more when the model is there. Raises ConfigError.

    On a GPU the dtype auto is the weights' own, of which 16 bits allow all options.
    """
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = default if config.dtype == "auto" else NAMED_DTYPES[config.dtype]
    config = with_drafter(config, has_head=shape.draft_head is not None)
    outline = Outline(shape, device, dtype, has_draft_head=reads_draft_head(config))
    draft_lm_head_of(config, outline)
    draft_layers_of(config, outline)
    check_deterministic(config, outline)
    if config.max_running is not None:
        check_adjustments(msgspec.structs.replace(config, device=device.type), outline)


def _scheduler(
    config: EngineConfig, model: CausalLM, pool: StatePool, max_model_len: int, prefill: PrefillPolicy
) -> Scheduler:
    return Scheduler(
        config,
        num_blocks=pool.num_blocks,
        max_model_len=max_model_len,
        vocab_size=model.spec.vocab_size,
        has_drafter=config.drafter != "none",
        model_identity=config.model_path,
        kv_dtype=str(model.dtype),
        prefill=prefill,
        num_checkpoints=pool.num_checkpoints if pool.has_row_state else None,
    )


def _load(
    config: EngineConfig, device: torch.device, max_model_len: int, progress: Callable[[float], None]
) -> CausalLM:
    has_head = read_model_spec(config.model_path).draft_head is not None
    make_model = make_dummy_model if config.load_format == "dummy" else load_model
    model = make_model(
        config.model_path,
        device=device,
        dtype=config.dtype,
        with_draft_head=reads_draft_head(with_drafter(config, has_head=has_head)),
        progress=progress,
        max_model_len=max_model_len,
    )
    warn_without_head(config, has_head=model.has_draft_head)
    return model


def _order_sums(config: EngineConfig, model: CausalLM) -> bool:
    """Gives all products that decide about the text one order of sums, and tries in which the library may compute many rows.

    Returns whether text depends on no other request, nor on the depth, nor on how a prompt is cut. Attention, norms,
    activations and sampling compute each row for itself everywhere; on a CPU products do in float32 and float64.
    """
    check_deterministic(config, model)
    is_deterministic = has_ordered_sums(config, model)
    if not is_deterministic or model.device.type != "cuda":
        return is_deterministic
    keep_sums_whole()
    tried: dict[torch.Size, bool] = {}
    for linear in model.target_linears():
        shape = linear.weight.shape
        if shape not in tried:
            tried[shape] = library_is_ordered(linear.weight)
            kind = "the library" if tried[shape] else "the project's kernels alone"
            logger.info("products with a weight of %d x %d: many rows by %s", *shape, kind)
        linear.make_batch_invariant(is_library_ordered=tried[shape])
    torch.cuda.empty_cache()
    return True


def _take_adjustments(config: EngineConfig, model: CausalLM) -> AdjustmentTable:
    check_adjustments(config, model)
    return AdjustmentTable(config.num_rows, model.spec.vocab_size, model.device)


def _synthetic(config: EngineConfig, model: CausalLM) -> SyntheticAcceptance | None:
    if config.synthetic_acceptance is None:
        return None
    return SyntheticAcceptance.of_rates(config.synthetic_acceptance, model.spec.vocab_size, model.device)


def _take_rows(config: EngineConfig, model: CausalLM, max_model_len: int) -> RowTensors:
    return RowTensors.allocate(
        config.num_rows,
        max_blocks=-(-max_model_len // config.block_size),
        max_pending=max_pending(config),
        hidden_size=model.spec.hidden_size,
        dtype=model.dtype,
        device=model.device,
        num_carries=num_carries(model),
    )


def _take_pool(config: EngineConfig, model: CausalLM, max_model_len: int) -> StatePool:
    layers, drafter = model.state(), drafter_state(config, model)
    bytes_of_row, available = row_bytes((*layers, drafter)), available_bytes(model.device)
    num_blocks = num_kv_blocks(
        config,
        max_model_len=max_model_len,
        block_bytes=block_bytes((*layers, drafter), config.block_size),
        available=available,
        row_bytes=bytes_of_row,
    )
    return StatePool(
        layers,
        drafter,
        num_blocks=num_blocks,
        num_rows=config.num_rows,
        num_checkpoints=num_checkpoints(config, row_bytes=bytes_of_row, available=available),
        block_size=config.block_size,
        device=model.device,
    )


def _info(
    config: EngineConfig,
    model: CausalLM,
    pool: StatePool,
    max_model_len: int,
    num_parameters: int,
    weights_bytes: int,
) -> EngineInfo:
    return EngineInfo(
        architecture=model.spec.architecture,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        kv_cache_bytes=pool.paged_bytes(),
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=max_model_len,
        max_running=config.num_rows,
        vocab_size=model.spec.vocab_size,
        depth=config.depth,
        has_draft_head=model.has_draft_head,
        drafter=config.drafter,
        has_dummy_weights=config.load_format == "dummy",
        synthetic_acceptance=config.synthetic_acceptance,
        draft_lm_head=config.draft_lm_head,
        draft_layers=config.draft_layers,
    )
