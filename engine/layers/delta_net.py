"""A gated delta net: a mixer with recurrent state, built from its DeltaNetSpec.

A token is computed in the same way whatever the depth, the chunk size or a prefix hit: prompt tokens in
pieces of DELTA_NET_GRID from position 0 on (chunks begin at its multiples), generated tokens one after the
other, in rounds and when they are recomputed after a preemption. The state of a row is written once a round:
the tokens of a window are stored, and the next round first applies those that were accepted.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.linear import Linear
from headway.engine.layers.placement import Placement
from headway.engine.layers.work import Work
from headway.engine.models.spec import DELTA_NET_GRID, DeltaNetSpec
from headway.engine.state.specs import LayerState, RowSpec
from headway.kernels import (
    Activation,
    DeltaRule,
    DeltaState,
    convolve_chunks,
    convolve_windows,
    delta_chunks,
    delta_windows,
    gated_rms_norm,
    mamba_state_selective_copy,
)


class DeltaNet:
    """Projections of queries, keys, values and gates (one product), a causal convolution, the gated delta
    rule, a gated norm, and the output projection. Each of several ranks has its share of the key heads, with
    their value heads. Immutable but for the weight formats of its Linear layers.

    V, K, D: the rank's number of value heads, and the dimensions of keys and of values. The state of a row,
    see `state`: states         [V, K, D]        after all tokens before its last window counts         []
    tokens of the last window that stayed mixed, gates   [window, ...]    the last window: keys and values,
    and the inputs of the gates convolution    [channels, taps - 1]           the last inputs of the
    convolution windows        [window, channels, taps - 1]   those after each token of the last window
    """

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, place: Placement) -> None:
        own = self._spec = replace(
            spec,
            num_key_heads=place.share(spec.num_key_heads, "heads of keys in delta nets"),
            num_value_heads=place.share(spec.num_value_heads, "heads of values in delta nets"),
        )
        self._dtype = place.dtype
        self._state_dtype = torch.float64 if place.dtype == torch.float64 else torch.float32
        value_size = spec.num_value_heads * spec.value_dim
        outputs = {
            "delta.qkv": spec.num_channels,
            "delta.z": value_size,
            "delta.b": spec.num_value_heads,
            "delta.a": spec.num_value_heads,
        }
        self.input = place.linear(outputs, hidden_size)
        self.output = place.linear({"delta.output": hidden_size}, value_size)
        self._convolution = place.empty(own.num_channels, 1, own.kernel_size)
        self._output_norm = place.empty(own.value_dim)
        in_full = Placement(place.device, self._state_dtype)
        self._rule = DeltaRule(
            own.num_key_heads,
            own.num_value_heads,
            own.key_dim,
            own.value_dim,
            in_full.empty(own.num_value_heads),
            in_full.empty(own.num_value_heads),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            **self.input.tensors(),
            "delta.convolution": self._convolution,
            "delta.decay_log": self._rule.decay_log,
            "delta.decay_bias": self._rule.decay_bias,
            "delta.output_norm": self._output_norm,
            **self.output.tensors(),
        }

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def work(self) -> Work:
        return Work.of(self.linears(), self.input.shape[0] + self.output.shape[1])

    def prompt_flop(self, length: int) -> float:
        """Counts three products of a token with the state of each head: the read for the key, the read for
        the query, and the update.

        It also counts, for each head and each pair of tokens in a piece: keys times keys, queries times keys,
        and the triangular system solved for keys (K dimensions each); the system solved for values, and the
        weighted values (D each). On average half of a piece precedes a token, with two operations each. The
        convolution and the padding of the last piece are left out.
        """
        key_dim, value_dim = self._spec.key_dim, self._spec.value_dim
        of_state = 3 * 2 * key_dim * value_dim
        of_piece = (3 * key_dim + 2 * value_dim) * min(length, DELTA_NET_GRID)
        return self._spec.num_value_heads * (of_state + of_piece) * length

    def cache_bytes(self, context: float) -> float:
        """Returns 0: no state is kept by token."""
        return 0.0

    def state(self, max_window: int) -> tuple[RowSpec, ...]:
        """Declares the state of each row."""
        spec, rule = self._spec, self._rule
        keys_values, kept_inputs = (
            spec.num_channels - rule.query_size,
            (spec.num_channels, spec.kernel_size - 1),
        )
        shape = spec.num_value_heads, spec.key_dim, spec.value_dim
        return (
            RowSpec("states", shape, self._state_dtype),
            RowSpec("counts", (), torch.int64),
            RowSpec("mixed", (max_window, keys_values), self._dtype),
            RowSpec("gates", (max_window, 2 * spec.num_value_heads), self._dtype),
            RowSpec("convolution", kept_inputs, self._dtype),
            RowSpec("windows", (max_window, *kept_inputs), self._dtype),
        )

    def __call__(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """x: [tokens, hidden], normed. Returns [tokens, V * D], which `output` is to multiply."""
        spec, rows = self._spec, inputs.rows
        assert rows is not None, "a recurrent layer is told which tokens belong to which row"
        projected = self.input(x)
        mixed, z, gates = projected.split_with_sizes(
            [spec.num_channels, spec.num_value_heads * spec.value_dim, 2 * spec.num_value_heads], dim=1
        )
        heads = z.view(len(z), spec.num_value_heads, spec.value_dim)
        result = torch.empty(heads.shape, dtype=z.dtype, device=z.device)
        in_windows = rows.num_windows * rows.width
        if in_windows > 0:
            ids = rows.state_ids[: rows.num_windows]
            windows = convolve_windows(
                mixed[:in_windows], self._convolution, state["convolution"], state["windows"], ids
            )
            kept = DeltaState(state["states"], state["counts"], state["mixed"], state["gates"])
            delta_windows(windows, gates[:in_windows], self._rule, kept, ids, result[:in_windows])
        if rows.chunks is not None:
            first, spans = rows.chunks.first_token, rows.chunks.spans
            chunks = convolve_chunks(
                mixed[first:], self._convolution, state["convolution"], rows.state_ids, spans
            )
            delta_chunks(
                chunks, gates[first:], self._rule, state["states"], rows.state_ids, spans, result[first:],
                piece_size=DELTA_NET_GRID,
            )  # fmt: skip
        return gated_rms_norm(result, heads, self._output_norm, spec.norm.epsilon).flatten(1)

    def update_state(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> None:
        """Changes the state as a call does, and also computes its result."""
        self(x, inputs, state)

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        """Stores the number of tokens of each row's window by which the next round advances its state, and
        the convolution inputs after the last of them, in all layers at once."""
        rows = inputs.rows
        assert rows is not None, "a recurrent layer is told which tokens belong to which row"
        ids = rows.state_ids[: rows.num_windows]
        is_padding, num_layers = (accepted == 0).long(), len(state["counts"])
        mamba_state_selective_copy(
            state["windows"], state["convolution"], is_padding, ids, accepted - 1, num_layers
        )
        state["counts"].index_copy_(1, ids, accepted.expand(num_layers, -1))
