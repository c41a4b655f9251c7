"""Llama 2, 3 and 3.1 to 3.3: a dense decoder without biases, with RoPE scaled by wavelength from 3.1 on."""

from __future__ import annotations

from headway.engine.models.config_keys import DecoderKeys, ResolvedConfig
from headway.engine.models.family import Family, attention_spec, decoder_names, decoder_spec, dense_spec
from headway.engine.models.spec import LayerSpec, ModelSpec


class LlamaKeys(DecoderKeys, frozen=True, kw_only=True):
    """The defaults of transformers' LlamaConfig; the last three keys are read by its shared code alone."""

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    attention_dropout: float | int | None = 0.0
    pretraining_tp: int | None = 1
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_chunk_size: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, LlamaKeys)
    if keys.hidden_size % keys.num_attention_heads != 0:
        raise resolved.error(
            f"hidden_size {keys.hidden_size} is no multiple of num_attention_heads {keys.num_attention_heads}"
        )
    if not 0 <= keys.initializer_range <= 1:
        raise resolved.error(f"initializer_range is {keys.initializer_range}; it must be from 0 to 1")
    for key in ("attention_chunk_size", "sliding_window"):
        if getattr(keys, key) is not None:
            raise resolved.error(f"{key} is {getattr(keys, key)}; supported is full attention in every layer")
    if keys.layer_types not in (None, ["full_attention"] * keys.num_hidden_layers):
        raise resolved.error("layer_types names other layers than num_hidden_layers times 'full_attention'")
    attention = attention_spec(
        resolved, has_qkv_bias=keys.attention_bias, has_output_bias=keys.attention_bias
    )
    layer = LayerSpec(attention, dense_spec(resolved, has_bias=keys.mlp_bias))
    return decoder_spec(resolved, lambda kind: layer)


FAMILY = Family(("LlamaForCausalLM",), "llama", LlamaKeys, read, decoder_names)
