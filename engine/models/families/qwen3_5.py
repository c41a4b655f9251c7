"""Qwen3.5, 3.6 and 3.8, dense: gated delta nets with gated attention in every fourth layer, and an MTP head.

All norms multiply by 1 + weight but that of a delta net's results. Checkpoints also hold a vision tower,
which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from headway.engine.models.config_keys import HybridKeys, ResolvedConfig
from headway.engine.models.family import (
    LAYER_NAMES,
    Family,
    WeightNames,
    attention_spec,
    dense_spec,
    layered_spec,
    norm_spec,
)
from headway.engine.models.spec import (
    DeltaNetSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    MtpSpec,
    NormSpec,
)

ROTARY_SHARE = 0.25
MTP_PREFIX = "mtp."
DELTA_NAMES = {
    "delta.qkv.weight": "linear_attn.in_proj_qkv.weight",
    "delta.z.weight": "linear_attn.in_proj_z.weight",
    "delta.b.weight": "linear_attn.in_proj_b.weight",
    "delta.a.weight": "linear_attn.in_proj_a.weight",
    "delta.convolution": "linear_attn.conv1d.weight",
    "delta.decay_log": "linear_attn.A_log",
    "delta.decay_bias": "linear_attn.dt_bias",
    "delta.output_norm": "linear_attn.norm.weight",
    "delta.output.weight": "linear_attn.out_proj.weight",
}
MTP_NAMES = {
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "token_norm": "mtp.pre_fc_norm_embedding.weight",
    "input.weight": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
}


class Qwen3_5Keys(HybridKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen3_5TextConfig; the keys of the MTP head are read by other servers
    alone."""

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 32768
    attention_dropout: float | int = 0.0
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mtp_num_hidden_layers: int | None = 0
    mtp_use_dedicated_embeddings: bool | None = False


def read(resolved: ResolvedConfig) -> ModelSpec:
    return hybrid_spec(resolved, dense_spec(resolved))


def hybrid_spec(resolved: ResolvedConfig, feed_forward: DenseSpec | ExpertsSpec) -> ModelSpec:
    """Returns the decoder and the MTP head, whose layers all have that feed-forward. The keys are
    Qwen3_5Keys. Raises ModelError for features that are not computed."""
    keys, norm = resolved.keys, replace(norm_spec(resolved), unit_offset=True)
    assert isinstance(keys, Qwen3_5Keys)
    attention = attention_spec(
        resolved,
        has_qkv_bias=keys.attention_bias,
        has_output_bias=keys.attention_bias,
        qk_norm=norm,
        default_rotary_share=ROTARY_SHARE,
    )
    with_attention = LayerSpec(replace(attention, has_output_gate=True), feed_forward)
    if feed_forward.activation != "silu":
        raise resolved.error(f"hidden_act is {keys.hidden_act!r}; supported is 'silu', as delta nets have it")
    makers = {
        "full_attention": lambda kind: with_attention,
        "linear_attention": lambda kind: LayerSpec(_delta_net_spec(resolved, keys), feed_forward),
    }
    spec = layered_spec(resolved, makers, norm)
    if "full_attention" not in resolved.layer_types:
        raise resolved.error("no layer is of type 'full_attention'; supported are models with one or more")
    return replace(spec, draft_head=_mtp_spec(resolved, keys, with_attention))


def _delta_net_spec(resolved: ResolvedConfig, keys: Qwen3_5Keys) -> DeltaNetSpec:
    key_heads, value_heads = keys.linear_num_key_heads, keys.linear_num_value_heads
    if value_heads % key_heads != 0:
        raise resolved.error(
            f"linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    if keys.linear_conv_kernel_dim < 2:
        raise resolved.error(f"linear_conv_kernel_dim is {keys.linear_conv_kernel_dim}; it must be 2 or more")
    return DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=keys.linear_key_head_dim,
        value_dim=keys.linear_value_head_dim,
        kernel_size=keys.linear_conv_kernel_dim,
        norm=NormSpec(keys.rms_norm_eps),
    )


def _mtp_spec(resolved: ResolvedConfig, keys: Qwen3_5Keys, layer: LayerSpec) -> MtpSpec | None:
    if keys.mtp_use_dedicated_embeddings:
        raise resolved.error(
            "mtp_use_dedicated_embeddings is true; supported are MTP heads with the model's own embedding"
        )
    if keys.mtp_num_hidden_layers not in (None, 0, 1):
        raise resolved.error(f"mtp_num_hidden_layers is {keys.mtp_num_hidden_layers}; supported are 0 and 1")
    if not keys.mtp_num_hidden_layers:
        return None
    return MtpSpec(1, layer, first="embedding", reads="post_norm", carries="post_norm")


def hybrid_names(
    model_prefix: str,
    vision_prefixes: tuple[str, ...] = (),
    further: Mapping[str, str] = MappingProxyType({}),
) -> WeightNames:
    """Returns the names of the tensors. model_prefix: the beginning of the names of the decoder's tensors.
    further: the names of a layer's tensors besides those of a dense one, by path."""
    own, layer = LAYER_NAMES | dict(further), f"{model_prefix}layers.{{}}."
    decoder = {
        "embedding": f"{model_prefix}embed_tokens.weight",
        "final_norm": f"{model_prefix}norm.weight",
        "lm_head.weight": "lm_head.weight",
        **{f"layers.{{}}.{path}": layer + name for path, name in (own | DELTA_NAMES).items()},
    }
    of_head = MTP_NAMES | {path: f"mtp.layers.{{}}.{name}" for path, name in own.items()}
    mtp = {f"mtp.{{}}.{path}": name for path, name in of_head.items()}
    return WeightNames(decoder | mtp, MTP_PREFIX, vision_prefixes)


FAMILY = Family(
    ("Qwen3_5ForConditionalGeneration",),
    "qwen3_5",
    Qwen3_5Keys,
    read,
    lambda spec: hybrid_names("model.language_model.", ("model.visual.",)),
    text_model_type="qwen3_5_text",
)
TEXT_FAMILY = Family(
    ("Qwen3_5ForCausalLM",), "qwen3_5_text", Qwen3_5Keys, read, lambda spec: hybrid_names("model.")
)
