"""Mixtral: the attention of Mistral, and a mixture of experts in every layer. Has no draft head."""

from __future__ import annotations

from typing import ClassVar

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.experts import agreed_count, expert_decoder_names, experts_spec
from headway.engine.models.families import mistral
from headway.engine.models.family import Family, WeightNames
from headway.engine.models.spec import ModelSpec

ROUTED_NAMES = {
    "feed_forward.router.weight": "block_sparse_moe.gate.weight",
    "feed_forward.experts.gate_up": "block_sparse_moe.experts.gate_up_proj",
    "feed_forward.experts.down": "block_sparse_moe.experts.down_proj",
}
EXPERT_PARTS = {
    "block_sparse_moe.experts.gate_up_proj": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "block_sparse_moe.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
}


class MixtralKeys(mistral.MistralKeys, frozen=True, kw_only=True):
    """The defaults of transformers' MixtralConfig."""

    default_theta: ClassVar[float] = 1e6

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, MixtralKeys)
    experts = experts_spec(
        resolved,
        num_experts=agreed_count(resolved, keys.num_experts, keys.num_local_experts, 8),
        top_k=keys.num_experts_per_tok,
        intermediate_size=keys.intermediate_size,
        normalises=True,
    )
    return mistral.decoder(resolved, experts)


def names(spec: ModelSpec) -> WeightNames:
    return expert_decoder_names(spec, ROUTED_NAMES, EXPERT_PARTS)


FAMILY = Family(("MixtralForCausalLM",), "mixtral", MixtralKeys, read, names)
