"""Random layers of the gated delta rule, and what transformers' functions compute for the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from headway.kernels import DeltaRule, DeltaState, TokenSpans, delta_chunks, delta_windows

PIECE_SIZE = 64
TAPS = 4


@dataclass(frozen=True)
class Sizes:
    """The numbers of heads of keys and of values, and their dimensions."""

    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 16
    value_dim: int = 32

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def rule_of(sizes: Sizes, device: torch.device, *, seed: int = 0) -> DeltaRule:
    generator = torch.Generator().manual_seed(seed)
    log, bias = torch.randn(2, sizes.value_heads, generator=generator).to(device)
    return DeltaRule(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, log, bias)


def tokens_of(
    sizes: Sizes, count: int, device: torch.device, dtype: torch.dtype = torch.float32, *, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the convolution gives, [count, channels], and the inputs of the gates, [count, 2 *
    value_heads], each a part of a wider tensor as in the layer."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, sizes.channels + 2 * sizes.value_heads + 8, generator=generator)
    wide = wide.to(device, dtype)
    return wide[:, : sizes.channels], wide[:, -2 * sizes.value_heads :]


def empty_state(
    sizes: Sizes,
    entries: int,
    max_width: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> DeltaState:
    """Returns states of zeros; what is kept of windows is rubbish."""
    kept = sizes.channels - sizes.key_heads * sizes.key_dim
    return DeltaState(
        torch.zeros(entries, sizes.value_heads, sizes.key_dim, sizes.value_dim, device=device),
        torch.zeros(entries, dtype=torch.int64, device=device),
        torch.full((entries, max_width, kept), 7.0, device=device, dtype=dtype),
        torch.full((entries, max_width, 2 * sizes.value_heads), 7.0, device=device, dtype=dtype),
    )


def expected(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    state: torch.Tensor | None = None,
    *,
    in_pieces: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns transformers' results for one sequence, [tokens, V, D], and its last state, [V, K, D]."""
    query, key, value = mixed.float().split(
        [rule.query_size, rule.query_size, mixed.shape[1] - 2 * rule.query_size], dim=1
    )
    write, decay = gates.float().chunk(2, dim=1)
    run = torch_chunk_gated_delta_rule if in_pieces else torch_recurrent_gated_delta_rule
    # Some versions of transformers repeat heads in these functions, others before them.
    query, key = (
        part.unflatten(1, (rule.num_key_heads, -1)).repeat_interleave(
            rule.num_value_heads // rule.num_key_heads, 1
        )
        for part in (query, key)
    )
    result, last = run(
        query[None],
        key[None],
        value.unflatten(1, (rule.num_value_heads, -1))[None],
        g=(-rule.decay_log.exp() * F.softplus(decay + rule.decay_bias))[None],
        beta=write.sigmoid()[None],
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return result[0], last[0]


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Computes transformers' convolution of one sequence from its first token on. Takes [tokens, channels]
    and [channels, 1, taps]."""
    return causal_conv1d_fn(x.float().T[None], weight.float()[:, 0], activation="silu")[0].T


def spans_of(
    spans: Sequence[tuple[int, int, int, bool]],
    device: torch.device,
) -> TokenSpans:
    """Makes spans of (row, first token, length, whether its tokens were generated)."""
    rows, firsts, lengths, generated = zip(*spans, strict=True)
    numbers = (torch.tensor(column, dtype=torch.int64, device=device) for column in (rows, firsts, lengths))
    return TokenSpans(*numbers, torch.tensor(generated, dtype=torch.bool, device=device))


def run_chunks(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: torch.Tensor,
    spans: Sequence[tuple[int, int, int, bool]],
    state_ids: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns [tokens, V, D], zeros where no span is."""
    device = mixed.device
    out = torch.zeros(len(mixed), rule.num_value_heads, rule.value_dim, dtype=mixed.dtype, device=device)
    ids = (
        torch.arange(len(states), device=device)
        if state_ids is None
        else torch.tensor(state_ids, device=device)
    )
    delta_chunks(mixed, gates, rule, states, ids, spans_of(spans, device), out, piece_size=PIECE_SIZE)
    return out


def run_windows(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    state: DeltaState,
    state_ids: Sequence[int],
) -> torch.Tensor:
    """Returns [rows * width, V, D]."""
    device = mixed.device
    out = torch.zeros(len(mixed), rule.num_value_heads, rule.value_dim, dtype=mixed.dtype, device=device)
    delta_windows(mixed, gates, rule, state, torch.tensor(state_ids, dtype=torch.int64, device=device), out)
    return out
