"""Defines what a family of models declares, and the common parts of families of dense decoders."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from headway.engine.models.config_keys import ATTENTION_TYPES, ConfigClass, DecoderKeys, ResolvedConfig
from headway.engine.models.rope_keys import rope_spec
from headway.engine.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec

# The activations by their names in transformers; some functions have two names.
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
MIN_POSITIONS = 2
_INDEX = re.compile(r"\d+")

ATTENTION_NAMES = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
FEED_FORWARD_NAMES = {
    f"feed_forward.{part}.{kind}": f"mlp.{part}_proj.{kind}"
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    **ATTENTION_NAMES,
    **FEED_FORWARD_NAMES,
}
DECODER_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    **{f"layers.{{}}.{path}": f"model.layers.{{}}.{name}" for path, name in LAYER_NAMES.items()},
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the experts' tensors. A checkpoint stores one packed tensor for all experts of a layer, or
    one for each expert.

    parts: by the end of a packed tensor's name, the ends of the names of an expert's tensors whose rows it
    contains one after the other. {} stands for the index of an expert.
    """

    num_experts: int
    parts: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows that a stored tensor has in groups, together with the rows of other tensors.

    source: the end of the stored tensor's name. It has num_groups groups of group_size rows, and this tensor
    is, for each of the spans (first row in the group, number of rows), these rows of every group.
    """

    source: str
    num_groups: int
    group_size: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The checkpoint's name of each parameter. {} stands for the index of a layer, in a path and in its name.

    Parts of a parameter that the engine keeps fused (query, key and value; gate and up) have paths of their
    own: the model shows them as views. draft_head_prefix: the beginning of the names of all tensors of a
    draft head, if there is one. vision_prefixes: those of tensors for images, which are not read. experts:
    the names of experts that a checkpoint may store one by one. regrouped: by the end of a name, the stored
    rows that it stands for.
    """

    patterns: Mapping[str, str]
    draft_head_prefix: str | None = None
    vision_prefixes: tuple[str, ...] = ()
    experts: ExpertNames | None = None
    regrouped: Mapping[str, RowGroups] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """`layers.3.attention.query.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
        pattern = self.patterns[_INDEX.sub("{}", path, count=1)]
        return pattern.format(*_INDEX.findall(path)[:1])


@dataclass(frozen=True, slots=True)
class Family:
    """architectures: the names that config.json's `architectures` gives. model_type, keys, text_model_type:
    see `ConfigClass`."""

    architectures: tuple[str, ...]
    model_type: str
    keys: type[DecoderKeys]
    read: Callable[[ResolvedConfig], ModelSpec]  # raises ModelError for what is not computed
    names: Callable[[ModelSpec], WeightNames]
    text_model_type: str | None = None

    @property
    def config_class(self) -> ConfigClass:
        return ConfigClass(self.model_type, self.keys, self.text_model_type)


def decoder_names(spec: ModelSpec) -> WeightNames:
    """Returns transformers' names of a dense decoder's tensors, without a draft head."""
    return WeightNames(DECODER_NAMES)


def decoder_spec(resolved: ResolvedConfig, make_layer: Callable[[str], LayerSpec]) -> ModelSpec:
    """Returns a decoder whose layers have attention, to all tokens or to a window. make_layer: makes the
    layer of a type, which `attention_spec` takes. Raises ModelError for features that no family of dense
    decoders computes."""
    makers = dict.fromkeys(ATTENTION_TYPES, make_layer)
    return layered_spec(resolved, makers, norm_spec(resolved))


def layered_spec(
    resolved: ResolvedConfig, makers: Mapping[str, Callable[[str], LayerSpec]], norm: NormSpec
) -> ModelSpec:
    """Returns a decoder. makers: the functions that make layers, by their type. Raises ModelError for
    features that no family computes."""
    keys, kinds = resolved.keys, dict.fromkeys(resolved.layer_types)
    if others := sorted(kinds.keys() - makers.keys()):
        raise resolved.error(f"layer_types has {others[0]!r}; supported are {' and '.join(makers)}")
    layers = {kind: makers[kind](kind) for kind in kinds}
    if keys.max_position_embeddings < MIN_POSITIONS:
        raise resolved.error(
            f"max_position_embeddings is {keys.max_position_embeddings}; it must be {MIN_POSITIONS} or more, "
            "for a token of the prompt and one that is generated"
        )
    pad = keys.pad_token_id
    if pad is not None and not -keys.vocab_size <= pad < keys.vocab_size:
        raise resolved.error(
            f"pad_token_id is {pad}; it must be below the vocab_size {keys.vocab_size}, or null"
        )
    return ModelSpec(
        architecture=resolved.architecture,
        vocab_size=keys.vocab_size,
        hidden_size=keys.hidden_size,
        layers=tuple(layers[kind] for kind in resolved.layer_types),
        norm=norm,
        max_position_embeddings=keys.max_position_embeddings,
        tied=keys.tie_word_embeddings,
        quantization=resolved.quantization,
        named_dtype=resolved.dtype,
    )


def norm_spec(resolved: ResolvedConfig) -> NormSpec:
    epsilon = resolved.keys.rms_norm_eps
    if not 0 <= epsilon < math.inf:
        raise resolved.error(f"rms_norm_eps is {epsilon}; it must be 0 or more")
    return NormSpec(epsilon)


def attention_spec(
    resolved: ResolvedConfig,
    layer_type: str = "full_attention",
    *,
    has_qkv_bias: bool,
    has_output_bias: bool = False,
    qk_norm: NormSpec | None = None,
    default_rotary_share: float | None = None,
) -> AttentionSpec:
    """default_rotary_share: see `rope_spec`."""
    heads, kv_heads, head_dim = (
        resolved.keys.num_attention_heads, resolved.num_key_value_heads, resolved.head_dim,
    )  # fmt: skip
    if heads % kv_heads != 0:
        default = type(resolved.keys)().num_key_value_heads
        raise resolved.error(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}, which is {default} "
            "where it is left out; give a divisor, or null for the number of attention heads"
        )
    if head_dim < 2 or head_dim % 2 != 0:
        raise resolved.error(f"head_dim is {head_dim}; rotary positions need an even one")
    rope = rope_spec(resolved, layer_type, default_share=default_rotary_share)
    window = resolved.sliding_window if layer_type == "sliding_attention" else None
    if layer_type == "sliding_attention" and window is None:
        raise resolved.error("layer_types has 'sliding_attention'; give the sliding_window of these layers")
    return AttentionSpec(
        heads, kv_heads, head_dim, rope, head_dim**-0.5, has_qkv_bias, has_output_bias, qk_norm, window
    )


def dense_spec(resolved: ResolvedConfig, *, has_bias: bool = False) -> DenseSpec:
    """Raises ModelError for an activation that is not computed."""
    return DenseSpec(resolved.keys.intermediate_size, has_bias, activation_of(resolved))


def activation_of(resolved: ResolvedConfig) -> Literal["silu", "gelu_tanh"]:
    """Returns the activation of feed-forwards. Raises ModelError for one that is not computed."""
    keys = resolved.keys
    if keys.hidden_act not in ACTIVATIONS:
        key = next(f.encode_name for f in msgspec.structs.fields(keys) if f.name == "hidden_act")
        supported = ", ".join(map(repr, ACTIVATIONS))
        raise resolved.error(f"{key} is {keys.hidden_act!r}; supported are {supported}")
    return ACTIVATIONS[keys.hidden_act]
