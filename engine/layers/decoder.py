"""What the families are built of: rotary positions, one decoder block of the Qwen2 kind.

Plain classes that hold tensors. Parameters are made uninitialised, fused where several projections read
the same input; `tensors` shows them part by part under the checkpoint's names. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.engine.layers.inputs import Chunks, ForwardInputs, Segment
from headway.engine.layers.linear import Linear
from headway.engine.models.model_config import ModelConfig
from headway.kernels import (
    FEW_ROWS,
    LateNorm,
    add_linear,
    add_rms_norm,
    gated_linear,
    is_streamed,
    paged_attention,
    prefill_attention,
    qkv_rope_append,
    rms_norm,
    rope_append,
    skinny_linear,
    varlen_attention,
)

# What a launch costs counts where products are short. An H200 takes for a round in nine launches a layer and in six:
# 1,024 wide 0.80 and 0.71 ms at batch 1, 0.94 and 0.74 at batch 8; 4,096 wide 4.14 and 4.21 at batch 4, at depth 3
# 5.03 and 5.10 at batch 1, before large weights streamed; where those of q, k and v do, nine are eight. No number of
# tokens may decide: a row's result is the same beside any of up to FEW_ROWS.
MAX_HIDDEN_OF_FEW_LAUNCHES = 2048
POSITIONS_AT_ONCE = 1 << 16


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
    computed on the CPU, so that they are the same on every device; some at a time, as a long table leaves
    no memory for copies of it.
    """
    dtype = torch.float64 if place.dtype == torch.float64 else torch.float32
    num_positions = config.max_position_embeddings
    table = torch.empty(num_positions, config.head_dim, device=place.device, dtype=dtype)
    if table.is_meta:
        return table
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    for start in range(0, num_positions, POSITIONS_AT_ONCE):
        part = table[start : start + POSITIONS_AT_ONCE]
        positions = torch.arange(start, start + len(part), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        part.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1))
    return table


def normed_sum(
    delta: torch.Tensor | None,  # [tokens, hidden]
    residual: torch.Tensor,  # [tokens, hidden], in place: += delta
    weight: torch.Tensor,  # [hidden]
    epsilon: float,
    step: torch.Tensor | None = None,  # [1] float32
) -> torch.Tensor:  # [tokens, hidden]
    """The norm of the new residual; with a step in float8."""
    if delta is None:
        return rms_norm(residual, weight, epsilon, step=step)
    return add_rms_norm(delta, residual, weight, epsilon, step=step)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the KV pool. first_position: keys before it do not exist."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    first_position: int = 0


class DecoderLayer:
    """Attention with grouped heads and biased q, k, v, then a gated feed-forward, both after their norms.

    The residual stream is changed in place. Called, a layer returns its feed-forward's output, or None where it is
    added already: the stream lags by one addition, which the next norm does on its way. In `feed_forward_inputs`, made
    for few tokens, products do what stands around them; see `run_layers`.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._inner = inner
        self.epsilon = config.rms_norm_epsilon
        self._scale = config.head_dim**-0.5
        has_whole_tiles = all(size % 64 == 0 for size in (hidden, inner, config.head_dim))
        self._gains_by_few_launches = has_whole_tiles and hidden <= MAX_HIDDEN_OF_FEW_LAUNCHES
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
        x: torch.Tensor,  # [tokens, hidden], normed, as `qkv` wants it
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor | None:
        """[tokens, hidden]: what is to be added to residual next, if anything."""
        query = self.append(x, inputs, cache, cos_sin)
        return self._feed_forward(self._attend(query, inputs, cache), residual)

    def _feed_forward(
        self,
        attended: torch.Tensor,  # [tokens, q_heads * head_dim]
        residual: torch.Tensor,  # [tokens, hidden], in place
    ) -> torch.Tensor | None:
        delta = self.output.added_to(residual, attended)
        x = normed_sum(delta, residual, self.feed_forward_norm, self.epsilon, self.gate_up.input_step)
        return self.down.added_to(residual, self.gate_up.gated(x))

    def takes_few(self, residual: torch.Tensor) -> bool:
        """Whether `feed_forward_inputs` is for these tokens: bfloat16 on a GPU, and products neither of a fixed order nor
        of float8. In float16 the residual stream may overflow when a norm's weight multiplies it before the norm has
        divided it."""
        is_bfloat16 = residual.is_cuda and residual.dtype == torch.bfloat16
        is_few = 0 < len(residual) <= FEW_ROWS
        return is_bfloat16 and is_few and self._gains_by_few_launches and self._is_plain

    @property
    def _is_plain(self) -> bool:
        """Whether `qkv` may be multiplied by a kernel of another kind."""
        return not self.qkv.has_fixed_order and self.qkv.input_step is None

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
        query = self._append_in_one(x, norm, inputs, cache, cos_sin)
        attended = self._attend(query, inputs, cache)
        x, norm = add_linear(attended, self.output.weight, residual, self.feed_forward_norm, self.epsilon)
        return gated_linear(x, self.gate_up.weight, norm=norm)

    def append(
        self,
        x: torch.Tensor,  # [tokens, hidden], normed
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor:
        """Writes the tokens' keys and values to the cache; returns their queries, [tokens, q_heads, head_dim]."""
        # First the device: on the CPU a packed layer has given up its weight.
        if x.is_cuda and self._is_plain and self._head_dim % 64 == 0 and is_streamed(x, self.qkv.weight):
            return self._append_in_one(x, None, inputs, cache, cos_sin)
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        rope_append(
            query, key, value, inputs.positions, cos_sin, cache.keys, cache.values, inputs.slot_mapping
        )
        return query

    def _append_in_one(
        self,
        x: torch.Tensor,  # [tokens, hidden]
        norm: LateNorm | None,  # of x; None: x is normed
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, head_dim]
    ) -> torch.Tensor:
        """[tokens, q_heads, head_dim]: the queries; keys and values are written. One launch."""
        bias = self.qkv.bias
        assert bias is not None
        return qkv_rope_append(
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

    def _attend(
        self,
        query: torch.Tensor,  # [tokens, q_heads, head_dim]
        inputs: ForwardInputs,
        cache: LayerCache,
    ) -> torch.Tensor:
        """[tokens, q_heads * head_dim]."""
        out = query.new_empty(query.shape)
        chunks = inputs.chunks
        for segment in inputs.segments:
            attend = prefill_attention if segment.is_prompt else paged_attention
            attend(
                _windows(query, segment),
                cache.keys,
                cache.values,
                segment.block_table,
                segment.start_positions,
                self._scale,
                first_position=cache.first_position,
                end_positions=segment.end_positions,
                out=_windows(out, segment),
            )
        if chunks is not None:
            self._attend_chunks(query, chunks, cache, out)
        return out.flatten(1)

    def _attend_chunks(
        self,
        query: torch.Tensor,  # [tokens, q_heads, head_dim]
        chunks: Chunks,
        cache: LayerCache,
        out: torch.Tensor,  # [tokens, q_heads, head_dim], written where chunks are
    ) -> None:
        assert cache.first_position == 0, "chunks are attended from their first key on"
        varlen_attention(
            query[chunks.first_token :],
            cache.keys,
            cache.values,
            chunks.block_table,
            chunks.first_tokens,
            chunks.lengths,
            chunks.start_positions,
            self._scale,
            out=out[chunks.first_token :],
        )


def run_layers(
    layers: Sequence[DecoderLayer],
    caches: Sequence[LayerCache],
    x: torch.Tensor,  # [tokens, hidden]: residual after the first layer's `input_norm`
    residual: torch.Tensor,  # [tokens, hidden], in place
    inputs: ForwardInputs,
    cos_sin: torch.Tensor,  # [max_position, head_dim]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs one layer after the other. Returns the residual and what is still to be added to it, if anything, both
    [tokens, hidden]."""
    if layers[0].takes_few(residual):
        _run_few(layers, caches, x, residual, inputs, cos_sin)
        return residual, None
    delta: torch.Tensor | None = None
    for layer, cache in zip(layers, caches, strict=True):
        if layer is not layers[0]:
            x = normed_sum(delta, residual, layer.input_norm, layer.epsilon, layer.qkv.input_step)
        delta = layer(x, residual, inputs, cache, cos_sin)
    return residual, delta


def _run_few(
    layers: Sequence[DecoderLayer],
    caches: Sequence[LayerCache],
    x: torch.Tensor,
    residual: torch.Tensor,
    inputs: ForwardInputs,
    cos_sin: torch.Tensor,
) -> None:
    """Between layers stand the residual stream times the next norm's weight, and what that norm is to divide by."""
    norm: LateNorm | None = None
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
