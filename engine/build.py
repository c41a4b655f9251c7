"""Puts an engine together from its configuration: device, model, memory, slot table, scheduler, runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from headway.engine.defaults import Outline, num_threads, prefill_policy, with_rows
from headway.engine.execution.runner import Runner
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.linear import Kind
from headway.engine.layers.placement import Placement
from headway.engine.loading.checkpoint import load_model, make_dummy_model
from headway.engine.loading.headers import NAMED_DTYPES, parameter_counts
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.options import (
    check_adjustments,
    check_audit,
    check_deterministic,
    check_recurrence,
    has_ordered_sums,
    wants_draft_head,
    with_drafter,
    with_formats,
)
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.messages import EngineInfo
from headway.engine.scheduling.depth.costs import CostTable
from headway.engine.scheduling.depth.policy import DepthPolicy
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.select import (
    check_of_missing_head,
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
    format_bytes,
    held_model_len,
    keep_freed_memory,
    num_checkpoints,
    num_kv_blocks,
    wanted_model_len,
)
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import AdjustmentTable
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import StateSpec, block_bytes, row_bytes
from headway.kernels import keep_sums_whole

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

    progress: called with the share that is loaded. drafter: drafts instead of the one that the configuration
    names.
    """
    device = wanted_device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _warn_of_meaningless_text(config)
    max_model_len = checked_model_len(config, device, available_bytes(device))
    model = _load(config, device, max_model_len, progress)
    draft_check = check_of_missing_head(config, model)
    config = with_drafter(config, has_head=model.has_draft_head or config.depth == 0)
    config = with_formats(config, model)
    if model.draft_head is not None:
        model.draft_head.choose_formats(config.draft_lm_head, config.draft_layers)
    _order_sums(config, model)
    num_parameters, weights_bytes = parameter_counts(model)
    if config.threads is None and device.type == "cpu":
        torch.set_num_threads(num_threads(num_parameters, torch.get_num_threads()))
    prefill = prefill_policy(config, model, num_parameters)
    config = with_rows(config, model, available_bytes(device))
    # These and the rows are taken before the pool takes most of what is left.
    adjustments = _take_adjustments(config, model)
    masks = MaskTable(config.num_rows, config.depth + 1, model.spec.vocab_size, device)
    slots = take_rows(config, model, max_model_len)
    pool = take_pool(config, model, max_model_len, available_bytes(device))
    max_model_len = served_model_len(config, pool, max_model_len)
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
    info = engine_info(config, model, pool, max_model_len, num_parameters, weights_bytes)
    return Engine(scheduler, runner, msgspec.structs.replace(info, draft_check=draft_check))


def measured_policy(engine: Engine) -> DepthPolicy:
    """Returns a policy for an engine with drafts that knows how long its rounds take. No request has come
    yet."""
    max_depth, runner = engine.info.depth, engine.runner
    measured, catch_ups = runner.measure_rounds(range(max_depth + 1)), runner.measure_catch_ups()
    return DepthPolicy(CostTable(runner.row_counts, max_depth, measured, catch_ups), max_depth)


def _warn_of_meaningless_text(config: EngineConfig) -> None:
    if config.load_format == "dummy":
        logger.warning("the weights are random (--load-format dummy): the text means nothing")
    if config.synthetic_acceptance is not None:
        logger.warning(
            "drafts are accepted at set rates, whatever they are (--synthetic-acceptance): the text means nothing"
        )


def wanted_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device is cuda, but torch sees no CUDA device; use --device cpu or check the driver"
        )
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def checked_model_len(
    config: EngineConfig, device: torch.device, available: int, *, has_float8: bool | None = None
) -> int:
    """Returns the most context in tokens that can be served. Judges all that can be judged before anything is
    loaded. Raises ModelError or ConfigError.

    available: bytes on the device. has_float8: as in Outline.
    """
    shape = read_model_spec(config.model_path)
    least = _least_state(config, shape, device)
    max_model_len = check_context(
        config,
        max_model_len=wanted_model_len(config, shape),
        block_bytes=block_bytes(least, config.block_size),
        row_bytes=row_bytes(least),
        device=device,
        available=available,
    )
    _check_options(config, shape, device, available, has_float8=has_float8)
    return max_model_len


def _least_state(
    config: EngineConfig, shape: ModelSpec, device: torch.device
) -> tuple[tuple[StateSpec, ...], ...]:
    """Returns what the layers keep without a draft head, in the narrowest dtype that the weights may turn out
    to have."""
    is_narrow = config.dtype in ("float16", "bfloat16") or (config.dtype == "auto" and device.type == "cuda")
    place = Placement(torch.device("meta"), torch.float16 if is_narrow else torch.float32)
    return CausalLM(shape, place, with_draft_head=False).state(max_window=1)


def _check_options(
    config: EngineConfig, shape: ModelSpec, device: torch.device, available: int, *, has_float8: bool | None
) -> None:
    """Judges by the outline what is judged once more when the model is there. Raises ConfigError.

    On a GPU the dtype auto is the weights' own, of which 16 bits allow all options.
    """
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = default if config.dtype == "auto" else NAMED_DTYPES[config.dtype]
    config = with_drafter(config, has_head=shape.draft_head is not None)
    outline = Outline(shape, device, dtype, has_draft_head=reads_draft_head(config), has_float8=has_float8)
    with_formats(config, outline)
    check_deterministic(config, outline)
    check_audit(config, outline)
    check_recurrence(config, shape)
    if config.max_running is not None:
        check_adjustments(msgspec.structs.replace(config, device=device.type), outline, available)


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
        prompt_grid=model.spec.prompt_grid,
    )


def _load(
    config: EngineConfig, device: torch.device, max_model_len: int, progress: Callable[[float], None]
) -> CausalLM:
    make_model = make_dummy_model if config.load_format == "dummy" else load_model
    model = make_model(
        config.model_path,
        device=device,
        dtype=config.dtype,
        with_draft_head=wants_draft_head(config, read_model_spec(config.model_path)),
        progress=progress,
        max_model_len=max_model_len,
    )
    warn_without_head(config, has_head=model.has_draft_head)
    return model


def _order_sums(config: EngineConfig, model: CausalLM) -> None:
    """Gives all products that decide about the text one order of sums, and tries in which the library may
    compute many rows.

    Attention, norms, activations and sampling compute each row for itself everywhere; on a CPU products do in
    float32 and float64.
    """
    check_deterministic(config, model)
    check_audit(config, model)
    device = model.device.type
    if device != "cuda" or not has_ordered_sums(config, device, model.dtype):
        return
    keep_sums_whole()
    tried: dict[Kind, bool] = {}
    for linear in model.target_linears():
        linear.order_sums(tried)
    for (shape, _), by_library in tried.items():
        computed_by = "the library" if by_library else "the project's kernels alone"
        logger.info("products with a weight of %d x %d: many rows by %s", *shape, computed_by)
    torch.cuda.empty_cache()


def _take_adjustments(config: EngineConfig, model: CausalLM) -> AdjustmentTable:
    check_adjustments(config, model, available_bytes(model.device))
    return AdjustmentTable(config.num_rows, model.spec.vocab_size, model.device)


def _synthetic(config: EngineConfig, model: CausalLM) -> SyntheticAcceptance | None:
    if config.synthetic_acceptance is None:
        return None
    return SyntheticAcceptance.of_rates(config.synthetic_acceptance, model.spec.vocab_size, model.device)


def take_rows(config: EngineConfig, model: CausalLM, max_model_len: int) -> RowTensors:
    """Allocates the state of requests on the model's device."""
    return RowTensors.allocate(
        config.num_rows,
        max_blocks=-(-max_model_len // config.block_size),
        max_pending=max_pending(config),
        hidden_size=model.spec.hidden_size,
        dtype=model.dtype,
        device=model.device,
        num_carries=num_carries(model),
    )


def kept_state(
    config: EngineConfig, model: CausalLM
) -> tuple[tuple[tuple[StateSpec, ...], ...], tuple[StateSpec, ...]]:
    """Declares what the pool holds: of each layer, and of the drafter. The configuration names its
    drafter."""
    return model.state(config.depth + 1), drafter_state(config, model)


def take_pool(config: EngineConfig, model: CausalLM, max_model_len: int, available: int) -> StatePool:
    """Allocates what layers and the drafter keep on the model's device, within the available bytes. Raises
    ConfigError."""
    layers, drafter = kept_state(config, model)
    bytes_of_row = row_bytes((*layers, drafter))
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


def served_model_len(config: EngineConfig, pool: StatePool, most: int) -> int:
    """Returns the context in tokens that the pool can hold for one request, `most` if it can, and logs what
    the model has more."""
    length = held_model_len(most, num_blocks=pool.num_blocks, block_size=pool.block_size)
    trained = wanted_model_len(config, read_model_spec(config.model_path))
    if length < trained:
        logger.warning(
            "the context is %s tokens, as many as fit: the model's %s would take %s of KV cache; a larger --kv-cache-memory or a "
            "narrower --dtype may allow more, and --max-model-len %d serves as many without this warning",
            f"{length:,}",
            f"{trained:,}",
            format_bytes((-(-trained // pool.block_size) + 1) * pool.block_bytes()),
            length,
        )
    return length


def engine_info(
    config: EngineConfig,
    model: CausalLM,
    pool: StatePool,
    max_model_len: int,
    num_parameters: int,
    weights_bytes: int,
) -> EngineInfo:
    """Returns what the server is told of the engine. The configuration is resolved; the model may be on the
    device meta."""
    return EngineInfo(
        architecture=model.spec.architecture,
        device=config.device,
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
        chooses_depth=config.chooses_depth and config.depth > 0,
        has_draft_head=model.has_draft_head,
        drafter=config.drafter,
        has_dummy_weights=config.load_format == "dummy",
        synthetic_acceptance=config.synthetic_acceptance,
        draft_lm_head=config.draft_lm_head,
        draft_layers=config.draft_layers,
        is_deterministic=has_ordered_sums(config, config.device, model.dtype),
    )
