"""Gemma 2: the block of Gemma 3 without norms of heads, with a soft cap of scores and of logits. Every other
layer has a sliding window."""

from __future__ import annotations

from headway.engine.models.config_keys import ResolvedConfig
from headway.engine.models.families.gemma3 import NAMES, GemmaKeys, gemma_spec
from headway.engine.models.family import Family, WeightNames
from headway.engine.models.spec import ModelSpec


class Gemma2Keys(GemmaKeys, frozen=True, kw_only=True):
    """The defaults of transformers' Gemma2Config."""

    vocab_size: int = 256_000
    max_position_embeddings: int = 8192
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def default_layer_types(self) -> list[str]:
        return self.local_layer_types(2)


def read(resolved: ResolvedConfig) -> ModelSpec:
    keys = resolved.keys
    assert isinstance(keys, Gemma2Keys)
    return gemma_spec(resolved, keys, has_qk_norm=False)


FAMILY = Family(("Gemma2ForCausalLM",), "gemma2", Gemma2Keys, read, lambda spec: WeightNames(NAMES))
