"""The common parts of families with mixtures of experts: the names of their tensors, and the reading of their
sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.family import DECODER_NAMES, ExpertNames, WeightNames, activation_of
from headway.engine.models.spec import DenseSpec, ExpertsSpec, ModelSpec

# The names in Qwen's families, whose layers can also have a dense feed-forward.
ROUTED_NAMES = {
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.experts.down": "mlp.experts.down_proj",
}
SHARED_NAMES = {
    "feed_forward.shared_gate.weight": "mlp.shared_expert_gate.weight",
    **{
        f"feed_forward.shared.{part}.weight": f"mlp.shared_expert.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}
EXPERT_PARTS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


def with_experts(
    names: WeightNames, spec: ModelSpec, parts: Mapping[str, tuple[str, ...]] = EXPERT_PARTS
) -> WeightNames:
    """Returns the names with those of single experts, as in Qwen's families or in `parts`."""
    return replace(names, experts=ExpertNames(num_experts_of(spec), parts))


def expert_decoder_names(
    spec: ModelSpec,
    routed_names: Mapping[str, str] = ROUTED_NAMES,
    parts: Mapping[str, tuple[str, ...]] = EXPERT_PARTS,
) -> WeightNames:
    """Returns transformers' names of the tensors of a decoder with experts, as in Qwen's families or as
    given."""
    routed = {f"layers.{{}}.{path}": f"model.layers.{{}}.{name}" for path, name in routed_names.items()}
    return with_experts(WeightNames(DECODER_NAMES | routed), spec, parts)


def num_experts_of(spec: ModelSpec) -> int:
    """Returns the number of experts in each layer that has some; 0 if no layer has any."""
    layers = spec.layers if spec.draft_head is None else (*spec.layers, spec.draft_head.layer)
    found = (layer.feed_forward for layer in layers)
    return next((part.num_experts for part in found if isinstance(part, ExpertsSpec)), 0)


def experts_spec(
    resolved: ResolvedConfig,
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    normalises: bool,
    shared_size: int | None = None,
) -> ExpertsSpec:
    """shared_size: the intermediate size of the shared expert; None: there is none. Raises ModelError for
    features that are not computed."""
    if top_k > num_experts:
        raise resolved.error(
            f"num_experts_per_tok is {top_k}; it must be at most the number of experts, {num_experts}"
        )
    if shared_size is not None and shared_size != intermediate_size:
        raise resolved.error(
            f"shared_expert_intermediate_size is {shared_size}, moe_intermediate_size {intermediate_size}; "
            "supported are shared experts of the size of the others"
        )
    return ExpertsSpec(
        num_experts, top_k, intermediate_size, normalises, shared_size is not None, activation_of(resolved)
    )


def with_dense_layers(
    spec: ModelSpec, dense: DenseSpec, *, sparse_step: int, dense_layers: Collection[int]
) -> ModelSpec:
    """Returns the spec with a dense feed-forward in the named layers and in all except every sparse_step-th
    one, counted from 1."""
    layers = tuple(
        replace(layer, feed_forward=dense) if index in dense_layers or (index + 1) % sparse_step else layer
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def agreed_count(resolved: ResolvedConfig, first: int | None, second: int | None, default: int) -> int:
    """Returns the number of experts, which config.json may give as num_experts and as num_local_experts.
    Raises ModelError where the two differ."""
    if first is not None and second is not None and first != second:
        raise resolved.error(f"num_experts is {first}, num_local_experts {second}; give one of them")
    return next((count for count in (first, second) if count is not None), default)
