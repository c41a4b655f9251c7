"""A made-up recurrent layer: a decaying sum over the tokens of each row, kept by row in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ForwardInputs, RowTokens
from headway.engine.layers.linear import Linear
from headway.engine.layers.work import Work
from headway.engine.state.specs import LayerState, RowSpec, StateSpec
from headway.kernels import Activation

NUM_CHANNELS = 192
DECAY = 0.875


class RunningSum:
    """s_i = DECAY * s_{i-1} + x_i, one token after the other, so that it does not matter where a pass begins.

    The window of a round is kept until `commit` says how much of it stays. passes: (tokens of windows, tokens
    of chunks).
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, scale: float = 1 / 16, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(2, NUM_CHANNELS, hidden_size, dtype=dtype, generator=generator) / 16
        self.input, self.output = Linear(weights[0].contiguous()), Linear(weights[1].T.contiguous() * scale)
        self.dtype = dtype
        self.committed: list[list[int]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def linears(self) -> tuple[Linear, ...]:
        return self.input, self.output

    def work(self) -> Work:
        return Work.of(self.linears(), 2 * NUM_CHANNELS)

    def prompt_flop(self, length: int) -> float:
        return 2 * NUM_CHANNELS * length

    def cache_bytes(self, context: float) -> float:
        return 0.0

    def state(self, max_window: int) -> tuple[StateSpec, ...]:
        return (
            RowSpec("sum", (NUM_CHANNELS,), self.dtype),
            RowSpec("window", (max_window, NUM_CHANNELS), self.dtype),
        )

    def __call__(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        assert inputs.rows is not None
        values = self.input(x)
        result = torch.zeros_like(values)
        self._sum_windows(values, inputs.rows, state, result)
        self._sum_chunks(values, inputs.rows, state, result)
        return result

    def _sum_windows(
        self, values: torch.Tensor, rows: RowTokens, state: LayerState, result: torch.Tensor
    ) -> None:
        for row in range(rows.num_windows):
            state_id, tokens = rows.state_ids[row], slice(row * rows.width, (row + 1) * rows.width)
            state["window"][state_id, : rows.width] = values[tokens]
            result[tokens], _ = self._run(state["sum"][state_id], values[tokens])

    def _sum_chunks(
        self, values: torch.Tensor, rows: RowTokens, state: LayerState, result: torch.Tensor
    ) -> None:
        if rows.chunks is None:
            return
        spans, first_token = rows.chunks.spans, rows.chunks.first_token
        numbers = zip(spans.rows.tolist(), spans.first_tokens.tolist(), spans.lengths.tolist(), strict=True)
        for row, first, length in numbers:
            if length > 0:
                state_id, place = rows.state_ids[row], first_token + first
                tokens = slice(place, place + length)
                result[tokens], state["sum"][state_id] = self._run(state["sum"][state_id], values[tokens])

    def update_state(self, x: Activation, inputs: ForwardInputs, state: LayerState) -> None:
        self(x, inputs, state)

    def commit(self, inputs: ForwardInputs, accepted: torch.Tensor, state: LayerState) -> None:
        assert inputs.rows is not None
        counts: Sequence[int] = accepted.tolist()
        self.committed.append(list(counts))
        for row, count in enumerate(counts[: inputs.rows.num_windows]):
            state_id = inputs.rows.state_ids[row]
            for sums, window in zip(state["sum"], state["window"], strict=True):
                _, sums[state_id] = self._run(sums[state_id], window[state_id, :count])

    @staticmethod
    def _run(start: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sums after each value, [n, channels], and the last one."""
        sums, total = [], start.clone()
        for value in values:
            total = DECAY * total + value
            sums.append(total)
        return torch.stack(sums) if sums else values, total


def with_running_sums(model: CausalLM, *, scale: float = 1 / 16) -> CausalLM:
    """Puts a RunningSum in the place of the first layer's attention."""
    model.layers[0].mixer = RunningSum(model.spec.hidden_size, model.dtype, scale=scale)
    return model
