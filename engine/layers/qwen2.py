"""Qwen2: a plain decoder with grouped heads and biased q, k, v. Ships no MTP head."""

from __future__ import annotations

import torch

from headway.engine.layers.decoder import DecoderLayer, LayerCache, Placement, rotary_table, run_layers
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.models.model_config import ModelConfig
from headway.engine.state.pool import KVPool
from headway.kernels import embed_rms_norm, rms_norm


class Qwen2:
    """See CausalLM in registry.py."""

    MTP_PREFIX: str | None = None
    has_mtp = False

    def __init__(self, config: ModelConfig, place: Placement, *, with_mtp: bool) -> None:
        assert not with_mtp, "Qwen2 ships no MTP head"
        self.config = config
        self.device, self.dtype = place.device, place.dtype
        self.num_kv_layers = config.num_layers
        self.cos_sin = rotary_table(config, place)
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, place) for _ in range(config.num_layers)]
        self.final_norm = place.empty(config.hidden_size)
        is_tied = config.tie_word_embeddings
        self.lm_head = Linear(
            self.embedding if is_tied else place.empty(config.vocab_size, config.hidden_size)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for index, layer in enumerate(self.layers):
            named |= layer.tensors(f"model.layers.{index}.")
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.lm_head.weight
        return named

    def linears(self) -> tuple[Linear, ...]:
        return (*(linear for layer in self.layers for linear in layer.linears()), self.lm_head)

    def forward(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        first = self.layers[0]
        residual, x = embed_rms_norm(inputs.token_ids, self.embedding, first.input_norm, first.epsilon)
        caches = [LayerCache(*pool.layer(index)) for index in range(len(self.layers))]
        residual, delta = run_layers(self.layers, caches, x, residual, inputs, self.cos_sin)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(rms_norm(hidden, self.final_norm, self.config.rms_norm_epsilon))

    def draft_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("Qwen2 has no MTP head: depth must be 0")

    def draft(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> torch.Tensor:
        raise AssertionError("Qwen2 has no MTP head: depth must be 0")

    def draft_logits(self, carry: torch.Tensor) -> torch.Tensor:
        raise AssertionError("Qwen2 has no MTP head: depth must be 0")

    def quantize_draft_lm_head(self) -> None:
        raise AssertionError("Qwen2 has no MTP head: nothing drafts")

    def screen_draft_lm_head(self) -> None:
        raise AssertionError("Qwen2 has no MTP head: nothing drafts")

    def draft_linears(self) -> tuple[Linear, ...]:
        return ()

    def round_draft_linears(self) -> None:
        raise AssertionError("Qwen2 has no MTP head: nothing drafts")

    def fill_draft_cache(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> None:
        raise AssertionError("Qwen2 has no MTP head: depth must be 0")
