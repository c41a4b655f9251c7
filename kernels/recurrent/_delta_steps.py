"""The gated delta rule token by token. One kernel computes the windows of rounds and chunks of generated
tokens, so that both have the same bits.

A program holds a tile of one head's state in registers: all K dimensions of keys and some of the D dimensions
of values.
"""

from __future__ import annotations

import torch

from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, jit_once_for, power_of_two, tl
from headway.kernels.types._delta_rule import DeltaRule, DeltaState, TokenSpans

# With fusion each thread would fuse another product with the sum, and threads would disagree about the sum.
_OPTIONS = {"enable_fp_fusion": False}
_MAX_VALUES = 32  # of a tile: 128 x 32 float32 are 32 registers of each of 128 threads


@jit
def unit(vector: tl.tensor) -> tl.tensor:
    """Returns the vector, [K] in float32 or float64, divided by its length."""
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + 1e-6)


@jit
def kept_share(decay: tl.tensor, log: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Returns the logarithm of the decay of a state, -exp(log) * softplus(decay + bias)."""
    value = decay + bias
    small = tl.exp(-tl.abs(value))
    # log1p: the quotient corrects what 1 + small rounds away.
    sum_ = 1 + small
    log1p = tl.where(sum_ == 1, small, tl.log(sum_) * small / tl.where(sum_ == 1, 1.0, sum_ - 1))
    return -tl.exp(log) * (tl.maximum(value, 0.0) + log1p)


@jit
def _stepped(
    tile: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    write: tl.tensor,
    decay: tl.tensor,
    has_key: tl.tensor,
    has_value: tl.tensor,
) -> tl.tensor:
    """Returns the tile after one token. write: the input of the write gate. decay: the result of
    `kept_share`. Both have the tile's dtype."""
    key = unit(wide(tl.load(key_ptr, mask=has_key, other=0.0)))
    value = wide(tl.load(value_ptr, mask=has_value, other=0.0))
    kept = tile * tl.exp(decay)
    found = tl.sum(kept * key[:, None], 0)
    change = (value - found) / (1 + tl.exp(-write))
    return tl.fma(key[:, None], change[None, :], kept)


# Neither the depth nor the alignment of numbers may compile another kernel, which could sum in another order.
@jit_once_for(
    "gate_ptr", "id_ptr", "row_ptr", "first_ptr", "length_ptr", "generated_ptr", "count_ptr", "width", "max_width"
)  # fmt: skip
def _steps_kernel(
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    count_ptr: tl.tensor,
    kept_mixed_ptr: tl.tensor,
    kept_gate_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    generated_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    max_width: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    query_size: tl.tensor,
    kept_size: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    SHARING: tl.constexpr,
    IS_SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes a row (or span), a head of values and VALUES of its dimensions."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, d = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = k < key_dim, d < value_dim
    log, bias = tl.load(log_ptr + head), tl.load(bias_ptr + head)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if IS_SPAN:
        state_id = tl.load(id_ptr + tl.load(row_ptr + row)).to(tl.int64)
        first, num_kept = tl.load(first_ptr + row).to(tl.int64), 0
        num_tokens = tl.where(tl.load(generated_ptr + row), tl.load(length_ptr + row), 0)
    else:
        state_id = tl.load(id_ptr + row).to(tl.int64)
        first, num_tokens = row * width, width
        num_kept = tl.minimum(tl.load(count_ptr + state_id), max_width)
    tile_ptr = state_ptr + ((state_id * heads + head) * key_dim + k[:, None]) * value_dim + d[None, :]
    has_both = has_key[:, None] & has_value[None, :]
    tile = tl.load(tile_ptr, mask=has_both & (num_kept + num_tokens > 0), other=0.0)
    key_place, value_place = head // SHARING * key_dim + k, query_size + head * value_dim + d
    for place in range(num_kept):
        kept_ptr = kept_mixed_ptr + (state_id * max_width + place) * kept_size
        own_gate_ptr = kept_gate_ptr + (state_id * max_width + place) * 2 * heads + head
        write = wide(tl.load(own_gate_ptr))
        decay = kept_share(wide(tl.load(own_gate_ptr + heads)), log, bias)
        tile = _stepped(tile, kept_ptr + key_place, kept_ptr + value_place, write, decay, has_key, has_value)
    if num_kept > 0:
        tl.store(tile_ptr, tile, mask=has_both)
    scale = 1 / tl.sqrt(key_dim.to(tile.dtype))
    for place in range(num_tokens):
        token_ptr = mixed_ptr + (first + place) * mixed_stride
        own_gate_ptr = gate_ptr + (first + place) * gate_stride + head
        write = wide(tl.load(own_gate_ptr))
        decay = kept_share(wide(tl.load(own_gate_ptr + heads)), log, bias)
        own_ptr = token_ptr + query_size
        tile = _stepped(tile, own_ptr + key_place, own_ptr + value_place, write, decay, has_key, has_value)
        query = unit(wide(tl.load(token_ptr + key_place, mask=has_key, other=0.0))) * scale
        result = tl.sum(tile * query[:, None], 0)
        to_ptr = out_ptr + ((first + place) * heads + head) * value_dim + d
        tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=has_value)
    if IS_SPAN:
        tl.store(tile_ptr, tile, mask=has_both & (num_tokens > 0))


def run_steps(
    mixed: torch.Tensor,  # [tokens, channels]
    gates: torch.Tensor,  # [tokens, 2 * V]
    rule: DeltaRule,
    state: DeltaState,
    state_ids: torch.Tensor,  # [rows] int64
    out: torch.Tensor,  # [tokens, V, D]
    spans: TokenSpans | None = None,
) -> None:
    """Launches the kernel for windows or, if spans are given, for the generated ones."""
    check_dense(rule.decay_log, rule.decay_bias, *state, state_ids, out)
    assert mixed.stride(1) == gates.stride(1) == 1, (mixed.stride(), gates.stride())
    num_rows = len(state_ids) if spans is None else len(spans.rows)
    values = min(power_of_two(rule.value_dim), _MAX_VALUES)
    overlaps, launch = overlap(mixed.device)
    where = (state_ids,) * 4 if spans is None else tuple(spans)
    _steps_kernel[(num_rows, rule.num_value_heads, blocks_of(rule.value_dim, values))](
        mixed, gates, rule.decay_log, rule.decay_bias, state.states, state.counts, state.mixed, state.gates,
        state_ids, *where, out, len(mixed) // num_rows, state.mixed.shape[1], rule.num_value_heads, rule.key_dim,
        rule.value_dim, rule.query_size, state.mixed.shape[2], mixed.stride(0), gates.stride(0),
        SHARING=rule.num_value_heads // rule.num_key_heads, IS_SPAN=spans is not None,
        KEYS=power_of_two(rule.key_dim), VALUES=values, OVERLAPS=overlaps, **_OPTIONS, **launch,
    )  # fmt: skip
