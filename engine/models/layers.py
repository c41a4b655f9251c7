"""What the families are built of: rotary positions, one decoder block of the Qwen2 kind.

Plain classes that hold tensors. Parameters are made uninitialised, fused where several projections read
the same input; `tensors` shows them part by part under the checkpoint's names. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.engine.model_config import ModelConfig
from headway.engine.models.inputs import ForwardInputs, Segment
from headway.engine.models.linear import Linear
from headway.kernels import (
    FEW_ROWS,
    LateNorm,
    add_linear,
    add_rms_norm,
    causal_attention,
    paged_attention,
    qkv_rope_append,
    rms_norm,
    rope_append,
    skinny_gate_up,
    skinny_linear,
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

    The residual stream is changed in place. Called, a layer takes the output of the feed-forward before it and
    returns its own: the stream lags by one addition, which the next norm does on its way. In `feed_forward_inputs`,
    made for few tokens, products do what stands around them; see `run_layers`.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._inner = inner
        self.epsilon = config.rms_norm_epsilon
        self._scale = config.head_dim**-0.5
        self._has_whole_tiles = all(size % 64 == 0 for size in (hidden, inner, config.head_dim))
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
        x = add_rms_norm(self.output(attended), residual, self.feed_forward_norm, self.epsilon)
        return self.down(self.gate_up.gated(x))

    def takes_few(self, residual: torch.Tensor, inputs: ForwardInputs) -> bool:
        """Whether `feed_forward_inputs` can be called: bfloat16 on a GPU. In float16 the residual stream may
        overflow when a norm's weight multiplies it before the norm has divided it."""
        has_layout = residual.is_cuda and residual.dtype == torch.bfloat16 and self._has_whole_tiles
        is_few = 0 < len(residual) <= FEW_ROWS and not any(s.is_self_contained for s in inputs.segments)
        return has_layout and is_few and not self.qkv.has_fixed_order

    def feed_forward_inputs(
        self,
        x: torch.Tensor,  # [tokens, hidden]: what `qkv` is to multiply
        norm: LateNorm | None,  # of x; None: x is normed
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor:
        """[tokens, intermediate]: what `down` is to multiply."""
        bias = self.qkv.bias
        assert bias is not None
        query = qkv_rope_append(
            x,
            self.qkv.weight,
            bias,
            norm,
            inputs.positions,
            cos_sin,
            cache.keys,
            cache.values,
            inputs.slot_mapping,
        )
        attended = torch.empty_like(query)
        for segment in inputs.segments:
            self._attend_cache(_windows(query, segment), segment, cache, _windows(attended, segment))
        x, norm = add_linear(
            attended.flatten(1), self.output.weight, residual, self.feed_forward_norm, self.epsilon
        )
        return skinny_gate_up(x, self.gate_up.weight, norm=norm)

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
            x = rms_norm(residual, self.input_norm, self.epsilon)
        else:
            x = add_rms_norm(delta, residual, self.input_norm, self.epsilon)
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
        for segment in inputs.segments:
            if segment.is_self_contained and cache.first_position == 0:
                q, k, v = (_windows(heads, segment) for heads in (query, key, value))
                attended = causal_attention(q, k, v, self._scale)
                if len(inputs.segments) == 1:
                    return attended.view(len(query), -1)
                _windows(out, segment).copy_(attended)
                continue
            self._attend_cache(_windows(query, segment), segment, cache, _windows(out, segment))
        return out.flatten(1)

    def _attend_cache(
        self,
        query: torch.Tensor,  # [rows, window, q_heads, head_dim]
        segment: Segment,
        cache: LayerCache,
        out: torch.Tensor,  # [rows, window, q_heads, head_dim], written
    ) -> None:
        paged_attention(
            query,
            cache.keys,
            cache.values,
            segment.block_table,
            segment.start_positions,
            self._scale,
            first_position=cache.first_position,
            end_positions=segment.end_positions,
            out=out,
        )


def run_layers(
    layers: Sequence[DecoderLayer],
    caches: Sequence[LayerCache],
    residual: torch.Tensor,  # [tokens, hidden], in place
    inputs: ForwardInputs,
    cos_sin: torch.Tensor,  # [max_position, head_dim]
) -> torch.Tensor | None:
    """Through one layer after the other. [tokens, hidden]: what is still to be added to residual; None: nothing."""
    if layers[0].takes_few(residual, inputs):
        _run_few(layers, caches, residual, inputs, cos_sin)
        return None
    delta: torch.Tensor | None = None
    for layer, cache in zip(layers, caches, strict=True):
        delta = layer(delta, residual, inputs, cache, cos_sin)
    return delta


def _run_few(
    layers: Sequence[DecoderLayer],
    caches: Sequence[LayerCache],
    residual: torch.Tensor,
    inputs: ForwardInputs,
    cos_sin: torch.Tensor,
) -> None:
    """Between layers stand the residual stream times the next norm's weight, and what that norm is to divide by."""
    norm: LateNorm | None = None
    x = rms_norm(residual, layers[0].input_norm, layers[0].epsilon)
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        inner = layer.feed_forward_inputs(x, norm, residual, inputs, cache, cos_sin)
        if layer is layers[-1]:
            skinny_linear(inner, layer.down.weight, residual=residual, out=residual)
        else:
            following = layers[index + 1]
            x, norm = add_linear(inner, layer.down.weight, residual, following.input_norm, following.epsilon)


def _windows(
    heads: torch.Tensor,  # [tokens, heads, head_dim], of all segments
    segment: Segment,
) -> torch.Tensor:
    """[rows, window, heads, head_dim]: the segment's."""
    tokens = slice(segment.first_token, segment.first_token + segment.rows * segment.window)
    return heads[tokens].view(segment.rows, segment.window, *heads.shape[1:])


def _parts(pattern: str, linear: Linear, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Rows of a fused linear under their own names: {} of the pattern is filled with the keys of `sizes`."""
    tensors = {"weight": linear.weight} | ({} if linear.bias is None else {"bias": linear.bias})
    split = list(sizes.values())
    return {
        f"{pattern.format(name)}.{kind}": part
        for kind, tensor in tensors.items()
        for name, part in zip(sizes, tensor.split_with_sizes(split), strict=True)
    }
