"""Gemma 3, text alone or as the text part of a model that sees images: layers with a sliding window between
layers that attend to everything, each kind with positions of its own, and four norms a block.

All norms multiply by 1 + weight. The vision tower of a checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import msgspec

from headway.engine.models.config_keys import DecoderKeys, ResolvedConfig
from headway.engine.models.family import (
    DECODER_NAMES,
    Family,
    WeightNames,
    attention_spec,
    decoder_spec,
    dense_spec,
    norm_spec,
)
from headway.engine.models.spec import LayerSpec, ModelSpec

NAMES = DECODER_NAMES | {
    "layers.{}.post_mixer_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers.{}.post_feed_forward_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
TEXT_PREFIX, VISION_PREFIXES = "language_model.", ("vision_tower.", "multi_modal_projector.")


class GemmaKeys(DecoderKeys, frozen=True, kw_only=True):
    """The keys that Gemma 2 and Gemma 3 have in common, with the defaults of transformers' config classes."""

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = 2
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None

    @property
    def window(self) -> int:
        return self.sliding_window

    def local_layer_types(self, pattern: int) -> list[str]:
        """Returns the types of layers of which every pattern-th attends to everything."""
        layers = range(self.num_hidden_layers)
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]


class Gemma3Keys(GemmaKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Gemma3TextConfig."""

    thetas_by_type: ClassVar[Mapping[str, tuple[str, float]]] = {
        "full_attention": ("rope_theta", 1e6),
        "sliding_attention": ("rope_local_base_freq", 1e4),
    }
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    use_bidirectional_attention: bool | None = False
    sliding_window_pattern: int = 6

    def default_layer_types(self) -> list[str]:
        return self.local_layer_types(self.sliding_window_pattern)


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, Gemma3Keys)
    if keys.attn_logit_softcapping is not None:
        raise resolved.error(
            f"attn_logit_softcapping is {keys.attn_logit_softcapping}, which no Gemma 3 was trained with and "
            "transformers does not compute; supported is null"
        )
    return gemma_spec(resolved, keys, has_qk_norm=True)


def read_text_part(resolved: ResolvedConfig) -> ModelSpec:
    spec = read(resolved)
    if spec.logit_soft_cap:
        raise resolved.error(
            f"final_logit_softcapping is {spec.logit_soft_cap}, which transformers computes for Gemma3ForCausalLM "
            "alone; supported is null"
        )
    return spec


def gemma_spec(resolved: ResolvedConfig, keys: GemmaKeys, *, has_qk_norm: bool) -> ModelSpec:
    """Returns the spec of a Gemma model. Raises ModelError for features that are not computed."""
    norm = replace(norm_spec(resolved), unit_offset=True)
    if keys.use_bidirectional_attention:
        raise resolved.error(
            "use_bidirectional_attention is true; supported are models whose tokens attend to earlier ones only"
        )
    if keys.hidden_size % keys.num_attention_heads != 0:
        raise resolved.error(
            f"hidden_size {keys.hidden_size} is no multiple of num_attention_heads {keys.num_attention_heads}"
        )
    attention_cap, logit_cap = (
        _soft_cap(resolved, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")
    )

    def layer(kind: str) -> LayerSpec:
        attention = attention_spec(
            resolved,
            kind,
            has_qkv_bias=keys.attention_bias,
            has_output_bias=keys.attention_bias,
            qk_norm=norm if has_qk_norm else None,
        )
        attention = replace(attention, scale=keys.query_pre_attn_scalar**-0.5, soft_cap=attention_cap)
        return LayerSpec(attention, dense_spec(resolved), post_mixer_norm=norm, post_feed_forward_norm=norm)

    spec = decoder_spec(resolved, layer)
    return replace(spec, norm=norm, embedding_scale=keys.hidden_size**0.5, logit_soft_cap=logit_cap)


def _soft_cap(resolved: ResolvedConfig, key: str) -> float:
    """Returns the soft cap, 0 if there is none."""
    cap = getattr(resolved.keys, key)
    if cap is not None and cap <= 0:
        raise resolved.error(f"{key} is {cap}; it must be above 0, or null")
    return cap or 0.0


FAMILY = Family(("Gemma3ForCausalLM",), "gemma3_text", Gemma3Keys, read, lambda spec: WeightNames(NAMES))
VISION_FAMILY = Family(
    ("Gemma3ForConditionalGeneration",),
    "gemma3",
    Gemma3Keys,
    read_text_part,
    lambda spec: WeightNames(
        {path: TEXT_PREFIX + name for path, name in NAMES.items()}, vision_prefixes=VISION_PREFIXES
    ),
    text_model_type="gemma3_text",
)
