"""What the families are built of: rotary positions, one decoder block of the Qwen2 kind.

Plain classes that hold tensors. Parameters are made uninitialised, fused where several projections read
the same input; `tensors` shows them part by part under the checkpoint's names. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.engine.model_config import ModelConfig
from headway.engine.models.inputs import ForwardInputs
from headway.engine.models.linear import Linear
from headway.kernels import (
    add_rms_norm,
    causal_attention,
    paged_attention,
    rms_norm,
    rope_append,
    varlen_attention,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where parameters live. The device "meta" gives shapes without memory."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)


def rotary_table(config: ModelConfig, place: Placement) -> torch.Tensor:
    """Cosines, then sines, of every position: [max_position_embeddings, head_dim] float32 or float64.

    The angles are rounded to float32 whatever the dtype, as they were when the models were trained, and
    computed on the CPU, so that they are the same on every device.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    dtype = torch.float64 if place.dtype == torch.float64 else torch.float32
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device=place.device, dtype=dtype)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the KV pool. first_position: keys before it do not exist."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    first_position: int = 0


class DecoderLayer:
    """Attention with grouped heads and biased q, k, v, then a gated feed-forward, both after their norms.

    The residual stream is changed in place and lags by one addition, which the next norm does on its way:
    a layer takes the output of the feed-forward before it and returns its own.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._inner = inner
        self._epsilon = config.rms_norm_epsilon
        self._scale = config.head_dim**-0.5
        qkv = sum(self._heads) * config.head_dim
        self.input_norm = place.empty(hidden)
        self.qkv = Linear(place.empty(qkv, hidden), place.empty(qkv))
        self.output = Linear(place.empty(hidden, config.num_attention_heads * config.head_dim))
        self.feed_forward_norm = place.empty(hidden)
        self.gate_up = Linear(place.empty(2 * inner, hidden))
        self.down = Linear(place.empty(hidden, inner))

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Parameters under the checkpoint's names; parts of a fused parameter are views of it."""
        qkv_sizes = dict(zip("qkv", (n * self._head_dim for n in self._heads), strict=True))
        own = {
            "input_layernorm.weight": self.input_norm,
            **_parts("self_attn.{}_proj", self.qkv, qkv_sizes),
            "self_attn.o_proj.weight": self.output.weight,
            "post_attention_layernorm.weight": self.feed_forward_norm,
            **_parts("mlp.{}_proj", self.gate_up, {"gate": self._inner, "up": self._inner}),
            "mlp.down_proj.weight": self.down.weight,
        }
        return {prefix + name: tensor for name, tensor in own.items()}

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def __call__(
        self,
        delta: torch.Tensor | None,  # [tokens, hidden]: still to be added to residual
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor:
        """[tokens, hidden]: what is to be added to residual next."""
        attended = self._attend(*self.append(delta, residual, inputs, cache, cos_sin), inputs, cache)
        x = add_rms_norm(self.output(attended), residual, self.feed_forward_norm, self._epsilon)
        return self.down(self.gate_up.gated(x))

    def append(
        self,
        delta: torch.Tensor | None,  # [tokens, hidden]: still to be added to residual
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Writes the tokens' keys and values; returns their queries, keys and values, [tokens, heads, head_dim]."""
        if delta is None:
            x = rms_norm(residual, self.input_norm, self._epsilon)
        else:
            x = add_rms_norm(delta, residual, self.input_norm, self._epsilon)
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        rope_append(
            query, key, value, inputs.positions, cos_sin, cache.keys, cache.values, inputs.slot_mapping
        )
        return query, key, value

    def _attend(
        self,
        query: torch.Tensor,  # [tokens, q_heads, head_dim]
        key: torch.Tensor,  # [tokens, kv_heads, head_dim]
        value: torch.Tensor,  # [tokens, kv_heads, head_dim]
        inputs: ForwardInputs,
        cache: LayerCache,
    ) -> torch.Tensor:
        """[tokens, q_heads * head_dim]."""
        out = query.new_empty(query.shape)
        if inputs.chunks is not None:
            assert cache.first_position == 0, "chunks are attended from their first key on"
            chunks = inputs.chunks
            varlen_attention(
                query,
                cache.keys,
                cache.values,
                chunks.block_table,
                chunks.first_tokens,
                chunks.lengths,
                chunks.start_positions,
                self._scale,
                out=out,
            )
        for segment in inputs.segments:
            tokens = slice(segment.first_token, segment.first_token + segment.rows * segment.window)
            shape = (segment.rows, segment.window, *query.shape[1:])
            if segment.is_self_contained and cache.first_position == 0:
                q, k, v = (p[tokens].view(*shape[:2], *p.shape[1:]) for p in (query, key, value))
                attended = causal_attention(q, k, v, self._scale)
                if len(inputs.segments) == 1:
                    return attended.view(len(query), -1)
                out[tokens].view(shape).copy_(attended)
                continue
            paged_attention(
                query[tokens].view(shape),
                cache.keys,
                cache.values,
                segment.block_table,
                segment.start_positions,
                self._scale,
                first_position=cache.first_position,
                end_positions=segment.end_positions,
                out=out[tokens].view(shape),
            )
        return out.flatten(1)


def _parts(pattern: str, linear: Linear, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Rows of a fused linear under their own names: {} of the pattern is filled with the keys of `sizes`."""
    tensors = {"weight": linear.weight} | ({} if linear.bias is None else {"bias": linear.bias})
    split = list(sizes.values())
    return {
        f"{pattern.format(name)}.{kind}": part
        for kind, tensor in tensors.items()
        for name, part in zip(sizes, tensor.split_with_sizes(split), strict=True)
    }
