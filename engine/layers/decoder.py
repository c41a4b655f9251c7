"""One decoder layer, built from its LayerSpec, and the pass through a list of layers.

Plain classes that hold tensors. Parameters are allocated uninitialised, fused where several projections read the same
input; `tensors` shows them part by part. Inference only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.engine.layers.inputs import Chunks, ForwardInputs, Segment
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import normed_sum
from headway.engine.layers.placement import Placement
from headway.engine.models.spec import LayerSpec, ModelSpec
from headway.engine.state.specs import LayerState, PagedSpec
from headway.kernels import (
    FEW_ROWS,
    HeadNorms,
    LateNorm,
    add_linear,
    gated_linear,
    is_streamed,
    paged_attention,
    prefill_attention,
    qkv_rope_append,
    rope_append,
    silu_mul,
    skinny_linear,
    varlen_attention,
)

# What a launch costs counts where products are short. An H200 takes for a round in nine launches a layer and in six:
# 1,024 wide 0.80 and 0.71 ms at batch 1, 0.94 and 0.74 at batch 8; 4,096 wide 4.14 and 4.21 at batch 4, at depth 3
# 5.03 and 5.10 at batch 1, before large weights streamed; where those of q, k and v do, nine are eight. No number of
# tokens may decide: a row's result is the same beside any of up to FEW_ROWS.
MAX_HIDDEN_OF_FEW_LAUNCHES = 2048


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the state pool. first_position: keys before it do not exist."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    first_position: int = 0

    @classmethod
    def of(cls, state: LayerState, first_position: int = 0) -> LayerCache:
        """Returns the cache in the state that `DecoderLayer.state` declares."""
        return cls(state["keys"], state["values"], first_position)


class DecoderLayer:
    """Attention with grouped heads, then a gated feed-forward, both after their norms.

    The residual stream is changed in place. Called, a layer returns its feed-forward's output, or None where it is added
    already: the stream lags by one addition, which the next norm does. In `feed_forward_inputs`, made for at most FEW_ROWS
    tokens, products do what stands around them; see `run_layers`.
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, place: Placement) -> None:
        attention, feed_forward = layer.mixer, layer.feed_forward
        hidden, inner, head_dim = spec.hidden_size, feed_forward.intermediate_size, attention.head_dim
        self.norm = spec.norm
        self._heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        self._head_dim = head_dim
        self._dtype = place.dtype
        self._inner = inner
        self._scale = attention.scale
        self._residual_scale = spec.residual_scale
        self._qk_norm = attention.qk_norm
        self._turns_whole_heads = attention.rope.rotary_dim == head_dim
        has_whole_tiles = all(size % 64 == 0 for size in (hidden, inner, head_dim))
        self._gains_by_few_launches = has_whole_tiles and hidden <= MAX_HIDDEN_OF_FEW_LAUNCHES
        qkv = sum(self._heads) * head_dim
        self.input_norm = place.empty(hidden)
        self.qkv = Linear(place.empty(qkv, hidden), place.empty(qkv) if attention.has_qkv_bias else None)
        self.output = Linear(
            place.empty(hidden, attention.num_heads * head_dim),
            place.empty(hidden) if attention.has_output_bias else None,
        )
        has_norms = attention.qk_norm is not None
        self.query_norm = place.empty(head_dim) if has_norms else None
        self.key_norm = place.empty(head_dim) if has_norms else None
        self.feed_forward_norm = place.empty(hidden)
        has_bias = feed_forward.has_bias
        self.gate_up = Linear(place.empty(2 * inner, hidden), place.empty(2 * inner) if has_bias else None)
        self.down = Linear(place.empty(hidden, inner), place.empty(hidden) if has_bias else None)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Parameters by their path; parts of a fused parameter are views of it."""
        sizes = (n * self._head_dim for n in self._heads)
        qkv_sizes = dict(zip(("query", "key", "value"), sizes, strict=True))
        norms = {"attention.query_norm": self.query_norm, "attention.key_norm": self.key_norm}
        hidden = len(self.input_norm)
        own = {
            "input_norm": self.input_norm,
            **_parts("attention.", self.qkv, qkv_sizes),
            **_parts("attention.", self.output, {"output": hidden}),
            **{path: weight for path, weight in norms.items() if weight is not None},
            "feed_forward_norm": self.feed_forward_norm,
            **_parts("feed_forward.", self.gate_up, {"gate": self._inner, "up": self._inner}),
            **_parts("feed_forward.", self.down, {"down": hidden}),
        }
        return {prefix + path: tensor for path, tensor in own.items()}

    def state(self) -> tuple[PagedSpec, ...]:
        """Declares what the layer keeps of each token: a key and a value."""
        shape = self._heads[1], self._head_dim
        return PagedSpec("keys", shape, self._dtype), PagedSpec("values", shape, self._dtype)

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, hidden], normed, as `qkv` wants it
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
    ) -> torch.Tensor | None:
        """[tokens, hidden]: what is to be added to residual next, if anything."""
        query = self.append(x, inputs, cache, cos_sin)
        return self._feed_forward(self._attend(query, inputs, cache), residual)

    def _feed_forward(
        self,
        attended: torch.Tensor,  # [tokens, q_heads * head_dim]
        residual: torch.Tensor,  # [tokens, hidden], in place
    ) -> torch.Tensor | None:
        delta = self._added(self.output, residual, attended)
        x = normed_sum(delta, residual, self.feed_forward_norm, self.norm, self.gate_up.input_step)
        inner = self.gate_up.gated(x) if self.gate_up.bias is None else silu_mul(self.gate_up(x))
        return self._added(self.down, residual, inner)

    def _added(
        self,
        linear: Linear,
        residual: torch.Tensor,  # [tokens, hidden], in place
        x: torch.Tensor,  # [tokens, in]
    ) -> torch.Tensor | None:
        """Returns what is still to be added to the residual, [tokens, hidden], or None."""
        if linear.bias is None and self._residual_scale == 1:
            return linear.added_to(residual, x)
        return linear(x).mul_(self._residual_scale)

    def takes_few(self, residual: torch.Tensor) -> bool:
        """Whether `feed_forward_inputs` is for these tokens: bfloat16 on a GPU, and products neither of a fixed order nor
        of float8. In float16 the residual stream may overflow when a norm's weight multiplies it before the norm has
        divided it."""
        is_bfloat16 = residual.is_cuda and residual.dtype == torch.bfloat16
        is_few = 0 < len(residual) <= FEW_ROWS
        return (
            is_bfloat16 and is_few and self._gains_by_few_launches and self._is_plain and self._adds_plainly
        )

    @property
    def _adds_plainly(self) -> bool:
        """Whether what is added to the residual stream is a product alone, after a norm without an offset."""
        has_bias = any(linear.bias is not None for linear in (self.output, self.gate_up, self.down))
        return not has_bias and self._residual_scale == 1 and not self.norm.unit_offset

    @property
    def _is_plain(self) -> bool:
        """Whether `qkv` may be multiplied by a kernel of another kind."""
        is_turned_whole = self._qk_norm is None and self._turns_whole_heads and self.qkv.bias is not None
        return is_turned_whole and not self.qkv.has_fixed_order and self.qkv.input_step is None

    def feed_forward_inputs(
        self,
        x: torch.Tensor,  # [tokens, hidden]: what `qkv` is to multiply
        norm: LateNorm | None,  # of x; None: x is normed
        residual: torch.Tensor,  # [tokens, hidden], in place
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
    ) -> torch.Tensor:
        """[tokens, intermediate]: what `down` is to multiply."""
        query = self._append_in_one(x, norm, inputs, cache, cos_sin)
        attended = self._attend(query, inputs, cache)
        x, norm = add_linear(
            attended, self.output.weight, residual, self.feed_forward_norm, self.norm.epsilon
        )
        return gated_linear(x, self.gate_up.weight, norm=norm)

    def append(
        self,
        x: torch.Tensor,  # [tokens, hidden], normed
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
    ) -> torch.Tensor:
        """Writes the tokens' keys and values to the cache; returns their queries, [tokens, q_heads, head_dim]."""
        # First the device: on the CPU a packed layer has given up its weight.
        if x.is_cuda and self._is_plain and self._head_dim % 64 == 0 and is_streamed(x, self.qkv.weight):
            return self._append_in_one(x, None, inputs, cache, cos_sin)
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        rope_append(
            query,
            key,
            value,
            inputs.positions,
            cos_sin,
            cache.keys,
            cache.values,
            inputs.slot_mapping,
            norms=self._head_norms(),
        )
        return query

    def _head_norms(self) -> HeadNorms | None:
        if self._qk_norm is None or self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm, self.key_norm, self._qk_norm.epsilon, self._qk_norm.unit_offset)

    def _append_in_one(
        self,
        x: torch.Tensor,  # [tokens, hidden]
        norm: LateNorm | None,  # of x; None: x is normed
        inputs: ForwardInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim]
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
    cos_sin: torch.Tensor,  # [max_position, rotary_dim]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs one layer after the other. Returns the residual and what is still to be added to it, if anything, both
    [tokens, hidden]."""
    if layers[0].takes_few(residual):
        _run_few(layers, caches, x, residual, inputs, cos_sin)
        return residual, None
    delta: torch.Tensor | None = None
    for layer, cache in zip(layers, caches, strict=True):
        if layer is not layers[0]:
            x = normed_sum(delta, residual, layer.input_norm, layer.norm, layer.qkv.input_step)
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
            x, norm = add_linear(
                inner, layer.down.weight, residual, following.input_norm, following.norm.epsilon
            )


def _windows(
    heads: torch.Tensor,  # [tokens, heads, head_dim], of all segments
    segment: Segment,
) -> torch.Tensor:
    """[rows, window, heads, head_dim]: the segment's."""
    tokens = slice(segment.first_token, segment.first_token + segment.rows * segment.window)
    return heads[tokens].view(segment.rows, segment.window, *heads.shape[1:])


def _parts(prefix: str, linear: Linear, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Returns the rows of a fused linear layer under their own paths; sizes: the number of rows of each part."""
    tensors = {"weight": linear.weight} | ({} if linear.bias is None else {"bias": linear.bias})
    split = list(sizes.values())
    return {
        f"{prefix}{name}.{kind}": part
        for kind, tensor in tensors.items()
        for name, part in zip(sizes, tensor.split_with_sizes(split), strict=True)
    }
