"""Resolves and checks the options of a configuration against a model, or against what is known of it before
it is loaded."""

from __future__ import annotations

import logging

import msgspec
import torch

from headway.engine.layers.model_pair import MakeDraft
from headway.engine.loading.headers import outline_of
from headway.engine.models.spec import ModelSpec
from headway.engine.outline import Outline
from headway.engine.parallel.group import group_of
from headway.engine.protocol.config import MAX_RANKS, CpuWeights, DraftLayers, DraftLmHead, EngineConfig
from headway.engine.protocol.errors import ConfigError, ModelError
from headway.engine.speculation.select import draft_maker_of, drafter_name
from headway.engine.state.memory import format_bytes
from headway.engine.state.processors import table_bytes
from headway.kernels import MAX_HIDDEN_OF_FEW_LAUNCHES, has_integer_products

MAX_PROCESSORS_SHARE = 0.25
MIN_QUANTIZED_WEIGHTS = 1 << 25
logger = logging.getLogger(__name__)


def with_drafter(config: EngineConfig, *, has_head: bool) -> EngineConfig:
    """Returns the configuration with auto resolved to a drafter, and depth 0 without one. Raises
    ConfigError."""
    name = drafter_name(config, has_head=has_head)
    return msgspec.structs.replace(config, drafter=name, depth=0 if name == "none" else config.depth)


def draft_maker(config: EngineConfig, spec: ModelSpec) -> MakeDraft | None:
    """Returns the function that makes the draft model that is to be loaded, by config.json. Raises
    ConfigError, and ModelError for a drafter's folder that does not fit the model."""
    return draft_maker_of(with_drafter(config, has_head=spec.draft_head is not None), spec)


def head_maker(config: EngineConfig, spec: ModelSpec) -> MakeDraft | None:
    """Returns the function that makes the draft model whose weights are among the model's own. Raises
    ConfigError."""
    return draft_maker(config, spec) if config.drafter_path is None else None


def with_formats(config: EngineConfig, outline: Outline) -> EngineConfig:
    """Returns the configuration with the device, and the formats of the weights that drafts read and that a
    CPU multiplies by. Raises ConfigError."""
    return msgspec.structs.replace(
        config,
        device=outline.device.type,
        draft_lm_head=draft_lm_head_of(config, outline),
        draft_layers=draft_layers_of(config, outline),
        cpu_weights=cpu_weights_of(config, outline),
    )


def cpu_weights_of(config: EngineConfig, outline: Outline) -> CpuWeights:
    """Returns the wanted format, or full on a GPU, or if this machine has no integer products, which is
    logged."""
    if config.cpu_weights == "full" or outline.device.type != "cpu":
        return "full"
    if not has_integer_products():
        logger.warning("--cpu-weights is %s, but full is used: see above", config.cpu_weights)
        return "full"
    return config.cpu_weights


def draft_lm_head_of(config: EngineConfig, outline: Outline) -> DraftLmHead:
    """Returns the wanted format. auto means low precision for 16-bit models on CUDA with a large lm_head,
    where it was measured to be faster, or else full."""
    vocab_size, hidden = outline.spec.vocab_size, outline.spec.hidden_size
    if outline.draft is not None:
        vocab_size, hidden = outline.draft.lm_head_shape
    is_16_bit = outline.has_draft_head and outline.device.type == "cuda" and outline.dtype.itemsize == 2
    of_all_ranks = 16 * outline.model.group.size  # each has its share of the vocabulary
    is_possible = is_16_bit and vocab_size % of_all_ranks == 0 and outline.facts.has_float8
    possible = {"int4": is_possible and hidden % 256 == 0, "fp8": is_possible and hidden % 128 == 0}
    wanted = config.draft_lm_head
    if not possible.get(wanted, True):
        drafting = "with" if outline.has_draft_head else "without"
        raise ConfigError(
            f"--draft-lm-head is {wanted}, which needs drafts by a 16-bit model on CUDA whose hidden size is a multiple "
            f"of {256 if wanted == 'int4' else 128}, its vocabulary one of {of_all_ranks} and the device of compute capability 8.9 or "
            f"later; this one is {outline.dtype} on {outline.device.type} with a hidden size of {hidden} and a vocabulary of "
            f"{vocab_size}, compute capability {outline.facts.capability}, {drafting} drafts; use auto"
        )
    if wanted != "auto":
        return wanted
    if hidden * vocab_size < MIN_QUANTIZED_WEIGHTS:
        return "full"
    preferred: tuple[DraftLmHead, ...] = ("int4", "fp8")
    return next((kind for kind in preferred if possible[kind]), "full")


def draft_layers_of(config: EngineConfig, outline: Outline) -> DraftLayers:
    """Returns the wanted format. auto means float8 for 16-bit models on CUDA whose layers take longer to read
    than to launch, or else full. Measured with the 7B shape on an H200: rounds of up to 32 rows and prompts
    gain about 1 %, larger rounds nothing; the embedded model's drafts lose 0.2 % of their tokens a round."""
    linears = () if outline.draft is None else outline.draft.norms_by_linear()
    sizes = sorted({size for linear in linears for size in linear.shape})
    has_shape = outline.dtype.itemsize == 2 and all(size % 16 == 0 for size in sizes)
    is_possible = outline.has_draft_head and has_shape and outline.facts.has_float8
    if config.draft_layers == "fp8" and not is_possible:
        raise ConfigError(
            "--draft-layers is fp8, which needs drafts by a 16-bit model on CUDA of compute capability 8.9 or later, all of "
            "whose layers' inputs and outputs are multiples of 16; this one is "
            f"{outline.dtype} on {outline.device.type}, compute capability {outline.facts.capability}, "
            f"{'with' if outline.has_draft_head else 'without'} drafts, of sizes {sizes}; use auto"
        )
    if config.draft_layers != "auto":
        return config.draft_layers
    hidden = 0 if outline.draft is None else outline.draft.lm_head_shape[1]
    return "fp8" if is_possible and hidden > MAX_HIDDEN_OF_FEW_LAUNCHES else "full"


def check_recurrence(config: EngineConfig, outline: Outline) -> None:
    """Raises ConfigError for prompt chunks that are too short for recurrent layers."""
    shape = outline.spec
    least = shape.prompt_grid
    if least is not None and config.prefill_chunk is not None and config.prefill_chunk < least:
        raise ConfigError(
            f"--prefill-chunk is {config.prefill_chunk}, it must be {least} or more for {shape.architecture}, whose recurrent "
            f"layers compute prompts in pieces of {least} tokens"
        )


def check_ranks(config: EngineConfig, spec: ModelSpec, make_draft: MakeDraft | None) -> None:
    """Raises ConfigError if several ranks cannot compute the model."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    given = f"--tensor-parallel-size is {size}"
    if config.cpu_weights != "full":
        raise ConfigError(
            f"{given}, and --cpu-weights {config.cpu_weights} is for one rank, whose norms are computed with its products; leave "
            "one of them out"
        )
    if config.dtype == "float64":
        raise ConfigError(
            f"{given}, but in float64 the order of a layer's sums depends on the number of its outputs, so that ranks would change "
            "the text; use --dtype float32"
        )
    problems = {
        number: _why_not_shared(spec, make_draft, number) for number in (size, *range(1, MAX_RANKS + 1))
    }
    if problems[size] is not None:
        served = ", ".join(str(number) for number, problem in sorted(problems.items()) if problem is None)
        raise ConfigError(f"{given}: {problems[size]}; sizes that this model is served with: {served}")


def _why_not_shared(spec: ModelSpec, make_draft: MakeDraft | None, size: int) -> str | None:
    """Returns the reason why that number of ranks cannot share the model, or None if it can."""
    try:
        outline_of(spec, torch.float32, make_draft, group=group_of(size))
    except ModelError as error:
        return str(error).partition(";")[0]
    return None


def has_ordered_sums(config: EngineConfig, outline: Outline) -> bool:
    """Returns whether all products that the text depends on are batch-invariant."""
    if config.fast_math and outline.device.type == "cuda":
        return False
    return all(linear.has_order(outline.device) for linear in outline.model.linears())


def check_deterministic(config: EngineConfig, outline: Outline) -> None:
    """Raises ConfigError if --deterministic cannot be met on this device or in this dtype."""
    if not config.deterministic or has_ordered_sums(config, outline):
        return
    if config.fast_math:
        raise ConfigError("--deterministic and --fast-math exclude each other; leave one of them out")
    remedy = "--dtype float32" if outline.device.type != "cuda" else "another --dtype or --device cpu"
    raise ConfigError(
        f"--deterministic has no kernels for {outline.dtype} on {outline.device.type}; use {remedy}"
    )


def check_cpu_weights(config: EngineConfig, outline: Outline) -> None:
    """Raises ConfigError for integer weights with another dtype than float32. config: the result of
    `with_formats`."""
    if config.cpu_weights != "full" and outline.dtype != torch.float32:
        raise ConfigError(
            f"--cpu-weights is {config.cpu_weights}, which is for torch.float32, not {outline.dtype}; "
            "use full or --dtype float32"
        )


def check_audit(config: EngineConfig, outline: Outline) -> None:
    """Raises ConfigError if a recomputed text may differ without a fault."""
    if config.audit_rate == 0:
        return
    given = f"--audit-rate is {config.audit_rate:g}, but a text may differ when it is computed again"
    if config.synthetic_acceptance is not None:
        raise ConfigError(f"{given} with --synthetic-acceptance; leave one of them out")
    if config.fast_math and outline.device.type == "cuda":
        raise ConfigError(f"{given} with --fast-math; leave one of them out")
    if not has_ordered_sums(config, outline):
        raise ConfigError(f"{given} in {outline.dtype} on {outline.device.type}; use --dtype float32")


def check_relaxed_thinking(config: EngineConfig) -> None:
    """Raises ConfigError if --relaxed-thinking, which lets drafts change the text, meets an option that
    excludes it, or no drafts. The configuration names its drafter."""
    if config.relaxed_thinking is None:
        return
    given = "--relaxed-thinking is LOSSY"
    others = {
        "--deterministic": config.deterministic,
        "--audit-rate": config.audit_rate > 0,
        "--synthetic-acceptance": config.synthetic_acceptance is not None,
    }
    for flag, is_set in others.items():
        if is_set:
            raise ConfigError(f"{given} and excludes {flag}; leave one of them out")
    if config.depth == 0:
        raise ConfigError(
            f"{given} by drafts, and nothing drafts; leave it out, or use --drafter ngram and a depth of 1 or more"
        )


def check_logits_processors(config: EngineConfig, outline: Outline, available: int) -> None:
    """Raises ConfigError if the tables of logits processors take too much memory. available: the bytes of the
    device."""
    vocab_size = outline.spec.vocab_size
    needed = table_bytes(config.num_rows, vocab_size)
    limit = MAX_PROCESSORS_SHARE * available
    if needed > limit:
        most = int(limit / table_bytes(1, vocab_size))
        raise ConfigError(
            f"penalties and biases of {config.num_rows} requests over {vocab_size:,} tokens take "
            f"{format_bytes(needed)}, the limit is {format_bytes(limit)} ({MAX_PROCESSORS_SHARE:.0%} of what "
            f"is available on {config.device}); "
            + (f"lower --max-running to {most}" if most else "use a device with more memory")
        )
