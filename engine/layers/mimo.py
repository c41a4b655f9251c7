"""MiMo: the trunk of Qwen2 and one MTP layer, itself a decoder block over pairs (h_{i-1}, t_i).

The head is fed with the residual stream before the final norm, and is carried on with its own normed output.
"""

from __future__ import annotations

import torch

from headway.engine.layers.decoder import DecoderLayer, LayerCache, Placement, normed_sum, run_layers
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear, QuantizedLinear, ScreenedLinear, largest_normed
from headway.engine.layers.qwen2 import Qwen2
from headway.engine.models.model_config import ModelConfig
from headway.engine.state.pool import KVPool
from headway.kernels import embed_rms_norm, rms_norm


class MiMo:
    """See CausalLM in registry.py. The MTP layer's keys and values are the pool's last layer."""

    MTP_PREFIX: str | None = "model.mtp_layers.0."

    def __init__(self, config: ModelConfig, place: Placement, *, with_mtp: bool) -> None:
        self.config = config
        self.device, self.dtype = place.device, place.dtype
        self.has_mtp = with_mtp
        self.num_kv_layers = config.num_layers + with_mtp
        self.trunk = Qwen2(config, place, with_mtp=False)
        self.head = MTPLayer(config, place) if with_mtp else None
        self._draft_lm_head: Linear | QuantizedLinear | ScreenedLinear = self.trunk.lm_head

    def tensors(self) -> dict[str, torch.Tensor]:
        head = {} if self.head is None else self.head.tensors("model.mtp_layers.0.")
        return self.trunk.tensors() | head

    def linears(self) -> tuple[Linear, ...]:
        head = () if self.head is None else (self.head.input, *self.head.block.linears())
        return self.trunk.linears() + head

    def forward(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        return self.trunk.forward(inputs, pool)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.trunk.logits(hidden)

    def draft_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def draft(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> torch.Tensor:
        assert self.head is not None, "the MTP head is not loaded: depth must be 0"
        pairs = self.head.pair(hidden, inputs.token_ids, self.trunk.embedding)
        return self.head.carry(pairs, inputs, self._cache(pool), self.trunk.cos_sin)

    def draft_logits(self, carry: torch.Tensor) -> torch.Tensor:
        return self._draft_lm_head(carry)

    def quantize_draft_lm_head(self) -> None:
        assert self.head is not None, "the MTP head is not loaded: depth must be 0"
        largest_input = largest_normed(self.head.final_norm)
        self._draft_lm_head = QuantizedLinear(self.trunk.lm_head, largest_input=largest_input)

    def screen_draft_lm_head(self) -> None:
        assert not isinstance(self._draft_lm_head, ScreenedLinear), "it was screened before"
        self._draft_lm_head = ScreenedLinear(self.trunk.lm_head, self._draft_lm_head)

    def draft_linears(self) -> tuple[Linear, ...]:
        return () if self.head is None else tuple(self.head.norms_by_linear())

    def round_draft_linears(self) -> None:
        assert self.head is not None, "the MTP head is not loaded: depth must be 0"
        for linear, norms in self.head.norms_by_linear().items():
            linear.round_to_float8(largest_input=max(map(largest_normed, norms)))

    def fill_draft_cache(self, inputs: ForwardInputs, hidden: torch.Tensor, pool: KVPool) -> None:
        assert self.head is not None, "the MTP head is not loaded: depth must be 0"
        pairs = self.head.pair(hidden, inputs.token_ids, self.trunk.embedding)
        block = self.head.block
        x = rms_norm(pairs, block.input_norm, block.epsilon, step=block.qkv.input_step)
        block.append(x, inputs, self._cache(pool), self.trunk.cos_sin)

    def _cache(self, pool: KVPool) -> LayerCache:
        return LayerCache(*pool.layer(self.config.num_layers), first_position=1)


class MTPLayer:
    """Joins a hidden state with a token, then one decoder block and a norm."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        hidden = config.hidden_size
        self._epsilon = config.rms_norm_epsilon
        self.hidden_norm = place.empty(hidden)
        self.token_norm = place.empty(hidden)
        self.input = Linear(place.empty(hidden, 2 * hidden))
        self.block = DecoderLayer(config, place)
        self.final_norm = place.empty(hidden)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}hidden_layernorm.weight": self.hidden_norm,
            f"{prefix}token_layernorm.weight": self.token_norm,
            f"{prefix}input_proj.weight": self.input.weight,
            f"{prefix}final_layernorm.weight": self.final_norm,
            **self.block.tensors(prefix),
        }

    def norms_by_linear(self) -> dict[Linear, tuple[torch.Tensor, ...]]:
        """The weights, [hidden] each, of the norms whose outputs it takes, of each linear layer that takes such: of all
        but attention's last and the feed-forward's last."""
        return {
            self.input: (self.hidden_norm, self.token_norm),
            self.block.qkv: (self.block.input_norm,),
            self.block.gate_up: (self.block.feed_forward_norm,),
        }

    def pair(
        self,
        hidden: torch.Tensor,  # [tokens, hidden]: h_{i-1}, or the carry of slot i - 1
        token_ids: torch.Tensor,  # [tokens] int64: t_i
        embedding: torch.Tensor,  # [vocab, hidden]
    ) -> torch.Tensor:  # [tokens, hidden]
        """The hidden state comes first, unlike in all other families."""
        step = self.input.input_step
        dtype = hidden.dtype if step is None else torch.float8_e4m3fn
        both = hidden.new_empty(len(hidden), 2 * hidden.shape[1], dtype=dtype)
        normed_hidden, normed_token = both.chunk(2, dim=1)
        rms_norm(hidden, self.hidden_norm, self._epsilon, step=step, out=normed_hidden)
        embed_rms_norm(token_ids, embedding, self.token_norm, self._epsilon, step=step, out=normed_token)
        return self.input(both)

    def carry(
        self,
        pairs: torch.Tensor,  # [tokens, hidden], overwritten
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor:  # [tokens, hidden]
        x = rms_norm(pairs, self.block.input_norm, self._epsilon, step=self.block.qkv.input_step)
        pairs, delta = run_layers([self.block], [cache], x, pairs, inputs, cos_sin)
        return normed_sum(delta, pairs, self.final_norm, self._epsilon)
