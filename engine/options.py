"""What a configuration asks for, resolved and checked against a model, or against what is known of it before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.models.spec import ModelSpec
from headway.engine.protocol.config import DraftLayers, DraftLmHead, EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.speculation.select import drafter_name
from headway.engine.state.memory import available_bytes, format_bytes
from headway.engine.state.processors import table_bytes
from headway.kernels import MAX_HIDDEN_OF_FEW_LAUNCHES, has_float8_products

MAX_ADJUSTMENTS_SHARE = 0.25
MIN_QUANTIZED_WEIGHTS = 1 << 25


@dataclass(frozen=True, slots=True)
class Outline:
    """Facts about a model that are known before its weights are read. has_draft_head: whether its draft head is loaded."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    has_draft_head: bool


def with_drafter(config: EngineConfig, *, has_head: bool) -> EngineConfig:
    """Returns the configuration with auto resolved to a drafter, depth 0 without one. Raises ConfigError."""
    name = drafter_name(config, has_head=has_head)
    return msgspec.structs.replace(config, drafter=name, depth=0 if name == "none" else config.depth)


def draft_lm_head_of(config: EngineConfig, model: CausalLM | Outline) -> DraftLmHead:
    """Returns the kind that is wanted. auto means few bits where that was measured to pay, for 16-bit models on CUDA with an
    lm_head that takes a while to read, else full."""
    hidden, vocab_size = model.spec.hidden_size, model.spec.vocab_size
    is_16_bit = model.has_draft_head and model.device.type == "cuda" and model.dtype.itemsize == 2
    is_possible = is_16_bit and vocab_size % 16 == 0 and has_float8_products(model.device)
    possible = {"int4": is_possible and hidden % 256 == 0, "fp8": is_possible and hidden % 128 == 0}
    wanted = config.draft_lm_head
    if not possible.get(wanted, True):
        drafting = "with" if model.has_draft_head else "without"
        raise ConfigError(
            f"--draft-lm-head is {wanted}, which needs drafts by a 16-bit model on CUDA whose hidden size is a multiple "
            f"of {256 if wanted == 'int4' else 128}, its vocabulary one of 16 and the device of compute capability 8.9 or "
            f"later; this one is {model.dtype} on {model.device.type} with a hidden size of {hidden} and a vocabulary of "
            f"{vocab_size}, compute capability {_capability(model.device)}, {drafting} drafts; use auto"
        )
    if wanted != "auto":
        return wanted
    if hidden * vocab_size < MIN_QUANTIZED_WEIGHTS:
        return "full"
    preferred: tuple[DraftLmHead, ...] = ("int4", "fp8")
    return next((kind for kind in preferred if possible[kind]), "full")


def draft_layers_of(config: EngineConfig, model: CausalLM | Outline) -> DraftLayers:
    """Returns the kind that is wanted. auto means float8 for 16-bit models on CUDA whose layers take longer to read than to
    launch, else full. Measured with the 7B shape on an H200: rounds of up to 32 rows and prompts gain by about 1 %, more
    rows nothing; the embedded model's drafts lose 0.2 % of their tokens a round."""
    shape = model.spec
    heads = shape.attention.num_heads + 2 * shape.attention.num_kv_heads
    sizes = shape.hidden_size, heads * shape.attention.head_dim, 2 * shape.intermediate_size
    has_shape = model.dtype.itemsize == 2 and all(size % 16 == 0 for size in sizes)
    is_possible = model.has_draft_head and has_shape and has_float8_products(model.device)
    if config.draft_layers == "fp8" and not is_possible:
        raise ConfigError(
            "--draft-layers is fp8, which needs drafts by a 16-bit model on CUDA of compute capability 8.9 or later, all of "
            "whose layers' inputs and outputs (hidden; q, k and v; gate and up) are multiples of 16; this one is "
            f"{model.dtype} on {model.device.type}, compute capability {_capability(model.device)}, "
            f"{'with' if model.has_draft_head else 'without'} drafts, of sizes {sizes}; use auto"
        )
    if config.draft_layers != "auto":
        return config.draft_layers
    return "fp8" if is_possible and model.spec.hidden_size > MAX_HIDDEN_OF_FEW_LAUNCHES else "full"


def has_ordered_sums(config: EngineConfig, model: CausalLM | Outline) -> bool:
    """Returns whether all products that decide about the text have one order of sums."""
    if model.device.type != "cuda":
        return model.dtype.itemsize > 2
    return model.dtype != torch.float64 and not config.fast_math


def check_deterministic(config: EngineConfig, model: CausalLM | Outline) -> None:
    """Raises ConfigError where --deterministic demands what this device or dtype does not give."""
    if not config.deterministic or has_ordered_sums(config, model):
        return
    if config.fast_math:
        raise ConfigError("--deterministic and --fast-math exclude each other; leave one of them out")
    remedy = "--dtype float32" if model.device.type != "cuda" else "another --dtype or --device cpu"
    raise ConfigError(
        f"--deterministic has no kernels for {model.dtype} on {model.device.type}; use {remedy}"
    )


def check_adjustments(config: EngineConfig, model: CausalLM | Outline) -> None:
    vocab_size, available = model.spec.vocab_size, available_bytes(model.device)
    needed = table_bytes(config.num_rows, vocab_size)
    limit = MAX_ADJUSTMENTS_SHARE * available
    if needed > limit:
        most = int(limit / table_bytes(1, vocab_size))
        raise ConfigError(
            f"penalties and biases of {config.num_rows} requests over {vocab_size:,} tokens take "
            f"{format_bytes(needed)}, the limit is {format_bytes(limit)} ({MAX_ADJUSTMENTS_SHARE:.0%} of what "
            f"is available on {config.device}); lower --max-running to {most}"
        )


def _capability(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else "-"
