"""Qwen2 and Qwen2.5: a dense decoder with grouped heads and biased queries, keys and values. Has no draft
head."""

from __future__ import annotations

from headway.engine.models.config_keys import ResolvedConfig, WindowKeys
from headway.engine.models.family import Family, attention_spec, decoder_names, decoder_spec, dense_spec
from headway.engine.models.spec import LayerSpec, ModelSpec


class Qwen2Keys(WindowKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen2Config."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768


def read(resolved: ResolvedConfig) -> ModelSpec:
    def layer(kind: str) -> LayerSpec:
        return LayerSpec(attention_spec(resolved, kind, has_qkv_bias=True), dense_spec(resolved))

    return decoder_spec(resolved, layer)


FAMILY = Family(("Qwen2ForCausalLM",), "qwen2", Qwen2Keys, read, decoder_names)
