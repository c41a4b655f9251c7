"""Qwen3, dense: Qwen2 without biases and with a norm of each head of queries and keys. Has no draft head."""

from __future__ import annotations

from headway.engine.models.config_keys import ResolvedConfig, WindowKeys
from headway.engine.models.family import (
    Family,
    attention_spec,
    decoder_names,
    decoder_spec,
    dense_spec,
    norm_spec,
)
from headway.engine.models.spec import LayerSpec, ModelSpec


class Qwen3Keys(WindowKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen3Config."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, Qwen3Keys)
    has_bias, norm = keys.attention_bias, norm_spec(resolved)

    def layer(kind: str) -> LayerSpec:
        attention = attention_spec(
            resolved, kind, has_qkv_bias=has_bias, has_output_bias=has_bias, qk_norm=norm
        )
        return LayerSpec(attention, dense_spec(resolved))

    return decoder_spec(resolved, layer)


FAMILY = Family(("Qwen3ForCausalLM",), "qwen3", Qwen3Keys, read, decoder_names)
