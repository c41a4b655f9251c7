"""Attention with grouped heads on the paged KV cache: a mixer, built from its AttentionSpec."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.placement import Placement
from headway.engine.layers.rotary import RotaryTables
from headway.engine.layers.work import Work
from headway.engine.models.spec import AttentionSpec
from headway.engine.state.specs import LayerState, PagedSpec, block_bytes
from headway.kernels import (
    Activation,
    HeadNorms,
    IntegerCpuWeight,
    ScoreRule,
    attention,
    cpu_attention,
    cpu_rope_append,
    fuses_qkv,
    has_cpu_attention,
    qkv_rope_append,
    rope_append,
    sigmoid_mul,
)


class Attention:
    """Projections of queries, keys and values (one product), their norms and rotation, attention, and the
    output projection.

    If results are gated, each query head comes before its gate in the projection: q0 gate0 q1 gate1 ... k v.
    The state is a key and a value for each token: LayerState "keys" and "values", [num_blocks, block_size,
    kv_heads, head_dim] each. Each of several ranks has its share of the heads. Immutable but for the weight
    formats of its Linear layers.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        tables: RotaryTables,
        *,
        first_position: int = 0,  # tokens before it have no keys
        input_size: int | None = None,  # None: hidden_size
    ) -> None:
        # Where there are fewer key heads than ranks, neighbouring ranks have the same head.
        kv_heads = spec.num_kv_heads * place.copies(spec.num_kv_heads)
        own = self._spec = replace(
            spec,
            num_heads=place.share(spec.num_heads, "heads of queries"),
            num_kv_heads=place.share(kv_heads, "heads of keys and values"),
        )
        self._cos_sin = tables.of(spec.rope)
        self._rule = ScoreRule(spec.scale, spec.soft_cap, first_position, spec.sliding_window or 0)
        self._cache_dtype = place.cache_dtype
        query_parts = 2 if spec.has_output_gate else 1
        self._heads = query_parts * own.num_heads, own.num_kv_heads, own.num_kv_heads
        key_size = kv_heads * spec.head_dim
        qkv = {
            "attention.query": query_parts * spec.num_heads * spec.head_dim,
            "attention.key": key_size,
            "attention.value": key_size,
        }
        self.input = place.linear(qkv, input_size or hidden_size, has_bias=spec.has_qkv_bias)
        self.output = place.linear(
            {"attention.output": hidden_size}, spec.num_heads * spec.head_dim, has_bias=spec.has_output_bias
        )
        self._head_norms: HeadNorms | None = None
        if spec.qk_norm is not None:
            query_norm, key_norm = place.empty(spec.head_dim), place.empty(spec.head_dim)
            self._head_norms = HeadNorms(query_norm, key_norm, spec.qk_norm.epsilon, spec.qk_norm.unit_offset)

    def tensors(self) -> dict[str, torch.Tensor]:
        own = self.input.tensors() | self.output.tensors()
        if self._head_norms is not None:
            own["attention.query_norm"] = self._head_norms.query
            own["attention.key_norm"] = self._head_norms.key
        return own

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def work(self) -> Work:
        return Work.of(self.linears(), self.input.shape[0] + self.output.shape[1])

    def prompt_flop(self, length: int) -> float:
        """Counts two operations for each dimension of queries and of values, and for each pair of tokens."""
        seen = self._seen(length)
        return 2 * self._spec.num_heads * self._spec.head_dim * seen * (2 * length - seen)

    def cache_bytes(self, context: float) -> float:
        return self._seen(context) * block_bytes((self.state(0),), 1)

    def _seen(self, context: float) -> float:
        """Returns the number of tokens that the last one attends to."""
        window = self._spec.sliding_window
        return context if window is None else min(context, window)

    def state(self, max_window: int) -> tuple[PagedSpec, ...]:
        """Declares the state of each token: a key and a value."""
        shape = self._heads[1], self._spec.head_dim
        return PagedSpec("keys", shape, self._cache_dtype), PagedSpec("values", shape, self._cache_dtype)

    def __call__(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """x: [tokens, in of `input`], normed. Returns [tokens, q_heads * head_dim], which `output` is to
        multiply."""
        query, gate = self._append(x, inputs, state)
        attended = self._attend(query, inputs, state)
        if gate is not None:
            sigmoid_mul(attended, gate)
        return attended.flatten(1)

    def update_state(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> None:
        """Writes the tokens' keys and values to the cache."""
        self._append(x, inputs, state)

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        """Does nothing: keys and values of rejected tokens are overwritten before they are read."""

    def _append(
        self, x: Activation, inputs: ForwardInputs, state: LayerState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes keys and values to the cache. Returns the rotated queries and, if there are any, their
        gates, [tokens, q_heads, head_dim] each."""
        if self._is_fused(x):
            query = qkv_rope_append(
                x.values,
                self.input.weight,
                self.input.bias,
                x.deferred,
                inputs.positions,
                self._cos_sin,
                state["keys"],
                state["values"],
                inputs.slot_mapping,
                is_ordered=self.input.is_batch_invariant,
            )
            return query, None
        heads = self.input(x).view(len(x.values), -1, self._spec.head_dim)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        gate = None
        if self._spec.has_output_gate:
            query, gate = query.view(len(query), -1, 2, self._spec.head_dim).unbind(2)
        caches = state["keys"], state["values"]
        if self._head_norms is None and self._is_compiled:
            cpu_rope_append(query, key, value, inputs.positions, self._cos_sin, *caches, inputs.slot_mapping)
        else:
            rope_append(
                query,
                key,
                value,
                inputs.positions,
                self._cos_sin,
                *caches,
                inputs.slot_mapping,
                norms=self._head_norms,
            )
        return query, gate

    @property
    def _is_compiled(self) -> bool:
        """Returns whether compiled functions for a CPU compute rotation and attention, which is so if they
        also compute the products."""
        group = self._spec.gqa_group_size
        return isinstance(self.input.stored, IntegerCpuWeight) and has_cpu_attention(
            self._spec.head_dim, group, self._rule
        )

    def _is_fused(self, x: Activation) -> bool:
        """Returns whether one launch multiplies, rotates and writes to the cache."""
        is_rotated_whole = self._spec.rope.rotary_dim == self._spec.head_dim
        is_plain = self._head_norms is None and not self._spec.has_output_gate
        has_form = is_plain and is_rotated_whole and self._spec.head_dim % 64 == 0
        return has_form and fuses_qkv(x, self.input.stored)

    def _attend(
        self,
        query: torch.Tensor,  # [tokens, q_heads, head_dim]
        inputs: ForwardInputs,
        state: LayerState,
    ) -> torch.Tensor:
        """Returns [tokens, q_heads, head_dim]."""
        out = query.new_empty(query.shape)
        attend = cpu_attention if self._is_compiled else attention
        for batch in inputs.batches:
            attend(query, state["keys"], state["values"], batch, self._rule, out=out)
        return out
