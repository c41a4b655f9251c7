"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B): the hybrid decoder and the MTP head of
Qwen3.5, with a mixture of experts and a shared expert in each of their layers."""

from __future__ import annotations

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.experts import ROUTED_NAMES, SHARED_NAMES, experts_spec, with_experts
from headway.engine.models.families.qwen3_5 import Qwen3_5Keys, hybrid_names, hybrid_spec
from headway.engine.models.family import Family, WeightNames
from headway.engine.models.spec import ExpertsSpec, ModelSpec


class Qwen3_5MoeKeys(Qwen3_5Keys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen3_5MoeTextConfig."""

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


def read(resolved: ResolvedConfig) -> ModelSpec:
    return hybrid_spec(resolved, shared_experts_spec(resolved, normalises=True))


def shared_experts_spec(resolved: ResolvedConfig, *, normalises: bool) -> ExpertsSpec:
    """Returns experts, one of them shared. The keys are Qwen3_5MoeKeys."""
    keys = resolved.keys
    assert isinstance(keys, Qwen3_5MoeKeys)
    return experts_spec(
        resolved,
        num_experts=keys.num_experts,
        top_k=keys.num_experts_per_tok,
        intermediate_size=keys.moe_intermediate_size,
        normalises=normalises,
        shared_size=keys.shared_expert_intermediate_size,
    )


def hybrid_expert_names(
    spec: ModelSpec, model_prefix: str, vision_prefixes: tuple[str, ...] = ()
) -> WeightNames:
    """The arguments: as for `hybrid_names`."""
    return with_experts(hybrid_names(model_prefix, vision_prefixes, ROUTED_NAMES | SHARED_NAMES), spec)


FAMILY = Family(
    ("Qwen3_5MoeForConditionalGeneration",),
    "qwen3_5_moe",
    Qwen3_5MoeKeys,
    read,
    lambda spec: hybrid_expert_names(spec, "model.language_model.", ("model.visual.",)),
    text_model_type="qwen3_5_moe_text",
)
TEXT_FAMILY = Family(
    ("Qwen3_5MoeForCausalLM",),
    "qwen3_5_moe_text",
    Qwen3_5MoeKeys,
    read,
    lambda spec: hybrid_expert_names(spec, "model."),
)
