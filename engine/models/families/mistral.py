"""Mistral and Ministral: the decoder of Llama without biases, whose layers may all have a sliding window."""

from __future__ import annotations

from headway.engine.models.config_keys import DecoderKeys, ResolvedConfig
from headway.engine.models.family import Family, attention_spec, decoder_names, decoder_spec, dense_spec
from headway.engine.models.spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec


class MistralKeys(DecoderKeys, frozen=True, kw_only=True):
    """The defaults of transformers' MistralConfig; the last two keys are read by its shared code alone."""

    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 4096 * 32
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    attention_dropout: float | int = 0.0
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window

    def default_layer_types(self) -> list[str]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [kind] * self.num_hidden_layers


def read(resolved: ResolvedConfig) -> ModelSpec:
    return decoder(resolved, dense_spec(resolved))


def decoder(resolved: ResolvedConfig, feed_forward: DenseSpec | ExpertsSpec) -> ModelSpec:
    """Returns a decoder whose layers all have that feed-forward. The keys are MistralKeys. Raises ModelError
    for features that are not computed."""
    keys = resolved.keys
    assert isinstance(keys, MistralKeys)
    if keys.attention_chunk_size is not None:
        raise resolved.error(f"attention_chunk_size is {keys.attention_chunk_size}; supported is null")
    if keys.layer_types not in (None, keys.default_layer_types()):
        raise resolved.error(
            f"layer_types differs from the sliding_window {keys.sliding_window}, which is every layer's; "
            "leave layer_types out"
        )

    def layer(kind: str) -> LayerSpec:
        return LayerSpec(attention_spec(resolved, kind, has_qkv_bias=False), feed_forward)

    return decoder_spec(resolved, layer)


FAMILY = Family(("MistralForCausalLM",), "mistral", MistralKeys, read, decoder_names)
