"""Qwen3 with experts (30B-A3B, 235B-A22B): the attention of Qwen3, and a mixture of experts in its layers.
Has no draft head."""

from __future__ import annotations

from headway.engine.models.config_keys import DecoderKeys, ResolvedConfig
from headway.engine.models.experts import agreed_count, expert_decoder_names, experts_spec, with_dense_layers
from headway.engine.models.family import Family, attention_spec, decoder_spec, dense_spec, norm_spec
from headway.engine.models.spec import LayerSpec, ModelSpec


class Qwen3MoeKeys(DecoderKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen3MoeConfig, which has a window for every layer or for none.
    layer_types and attention_chunk_size are read by its shared code alone."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    attention_dropout: float | int = 0.0
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 768
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def default_layer_types(self) -> list[str]:
        return ["full_attention" if self.window is None else "sliding_attention"] * self.num_hidden_layers


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, Qwen3MoeKeys)
    if keys.attention_chunk_size is not None:
        raise resolved.error(f"attention_chunk_size is {keys.attention_chunk_size}; supported is null")
    if keys.layer_types not in (None, keys.default_layer_types()):
        raise resolved.error(
            f"layer_types differs from the sliding_window {keys.window}, which is every layer's; leave layer_types out"
        )
    has_bias, norm = keys.attention_bias, norm_spec(resolved)
    experts = experts_spec(
        resolved,
        num_experts=agreed_count(resolved, keys.num_experts, keys.num_local_experts, 128),
        top_k=keys.num_experts_per_tok,
        intermediate_size=keys.moe_intermediate_size,
        normalises=keys.norm_topk_prob,
    )

    def layer(kind: str) -> LayerSpec:
        attention = attention_spec(
            resolved, kind, has_qkv_bias=has_bias, has_output_bias=has_bias, qk_norm=norm
        )
        return LayerSpec(attention, experts)

    return with_dense_layers(
        decoder_spec(resolved, layer),
        dense_spec(resolved),
        sparse_step=keys.decoder_sparse_step,
        dense_layers=keys.mlp_only_layers or (),
    )


FAMILY = Family(("Qwen3MoeForCausalLM",), "qwen3_moe", Qwen3MoeKeys, read, expert_decoder_names)
