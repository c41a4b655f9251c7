"""Qwen3-Next (80B-A3B, Coder-Next): the computation of Qwen3.5 with experts, with further keys in
config.json. Its checkpoints store the projections of delta nets by head, and have an MTP head that
config.json does not mention."""

from __future__ import annotations

from dataclasses import replace

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.experts import with_dense_layers
from headway.engine.models.families.qwen3_5 import hybrid_spec
from headway.engine.models.families.qwen3_5_moe import (
    Qwen3_5MoeKeys,
    hybrid_expert_names,
    shared_experts_spec,
)
from headway.engine.models.family import Family, RowGroups, WeightNames, dense_spec
from headway.engine.models.spec import DeltaNetSpec, ModelSpec

QKVZ, BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"


class Qwen3NextKeys(Qwen3_5MoeKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Qwen3NextConfig, and an MTP head of one layer."""

    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_experts_per_tok: int = 10
    num_experts: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    mtp_num_hidden_layers: int | None = 1


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, Qwen3NextKeys)
    experts = shared_experts_spec(resolved, normalises=keys.norm_topk_prob)
    return with_dense_layers(
        hybrid_spec(resolved, experts),
        dense_spec(resolved),
        sparse_step=keys.decoder_sparse_step,
        dense_layers=keys.mlp_only_layers or (),
    )


def names(spec: ModelSpec) -> WeightNames:
    deltas = (layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNetSpec))
    delta = next(deltas, None)
    own = hybrid_expert_names(spec, "model.")
    return own if delta is None else replace(own, regrouped=_regrouped(delta))


def _regrouped(delta: DeltaNetSpec) -> dict[str, RowGroups]:
    """A group of rows belongs to one key head: its query, its key, and the values and output gates of its
    value heads; another one has their gates b and a."""
    keys, values = delta.key_dim, delta.num_value_heads // delta.num_key_heads * delta.value_dim
    gates, groups = delta.num_value_heads // delta.num_key_heads, delta.num_key_heads
    qkvz, ba = 2 * keys + 2 * values, 2 * gates
    spans = (0, keys), (keys, keys), (2 * keys, values)
    return {
        "linear_attn.in_proj_qkv.weight": RowGroups(QKVZ, groups, qkvz, spans),
        "linear_attn.in_proj_z.weight": RowGroups(QKVZ, groups, qkvz, ((2 * keys + values, values),)),
        "linear_attn.in_proj_b.weight": RowGroups(BA, groups, ba, ((0, gates),)),
        "linear_attn.in_proj_a.weight": RowGroups(BA, groups, ba, ((gates, gates),)),
    }


FAMILY = Family(("Qwen3NextForCausalLM",), "qwen3_next", Qwen3NextKeys, read, names)
