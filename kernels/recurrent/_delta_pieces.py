"""The chunked form of the gated delta rule in two launches. The first computes, for all pieces at once, what
depends on a piece's own tokens only. The second processes the pieces of each span one after the other.

Within a piece token i writes the difference between its value and what the state predicts then, which is a
triangular system over the tokens before it. The first launch inverts the system, the second applies it. A
piece that is not full is padded with zeros.

No product has tiles for Hopper's asynchronous tensor cores (64 rows by four warps), because Triton 3.6
compiles kernels with several such products to code that reads operands before they are there
(https://github.com/fla-org/flash-linear-attention/pull/988). The first launch has two warps; the second
computes transposed products, whose rows are the few dimensions of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.recurrent._delta_steps import kept_share
from headway.kernels.recurrent._spans import searched_spans
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, jit_once_for, power_of_two, tl
from headway.kernels.types._delta_rule import DeltaRule, TokenSpans

_MAX_VALUES, _MAX_WIDE_VALUES = 32, 16  # of the state's tile, for products of 16-bit numbers and of others
_CHUNK = 32  # dimensions of keys at a time
# With fusion each thread would fuse another product with the sum, and threads would disagree about the sum.
_OPTIONS = {"enable_fp_fusion": False}
_SYSTEM_OPTIONS = _OPTIONS | {"num_warps": 2, "num_stages": 1}
_PIECE_OPTIONS = _OPTIONS | {"num_warps": 8}
_STAGES = 2  # for 16-bit operands; float32 operands fill the shared memory with one stage


class _Systems(NamedTuple):
    """The results of the first launch. Matrices have the dtype in which they are multiplied."""

    inverses: torch.Tensor  # [tokens, V, PIECE]: rows of the inverse of the triangular system
    seen: torch.Tensor  # [tokens, V, PIECE]: the share of each token's write in the piece that a query reads
    # [4, tokens, V]: the write gates; the logarithm of the decay since the start of the piece; the factors
    # that scale the key to length 1, and the query to 1 / sqrt(K)
    numbers: torch.Tensor


@jit
def _operand(value: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Returns the value as an operand: rounded to bfloat16 if PRECISION is "bf16", else wide."""
    return value.to(tl.bfloat16) if PRECISION == "bf16" else wide(value)


@jit
def _dot(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Returns a @ b of operands, in float32 or float64."""
    return tl.dot(a, b) if PRECISION == "bf16" else tl.dot(a, b, input_precision=PRECISION)


@jit
def _products(
    left_ptr: tl.tensor,  # [PIECE] of pointers, to the first number of a head
    right_ptr: tl.tensor,  # [PIECE] of pointers
    is_token: tl.tensor,
    key_dim: tl.tensor,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (the products of each left vector with each right vector, [PIECE, PIECE]; those of the left
    vectors with themselves, [PIECE]). CHUNK dimensions are loaded at a time to save registers."""
    k = tl.arange(0, CHUNK)
    own = wide(tl.load(left_ptr, mask=is_token, other=0.0)) * 0
    products = own[:, None] + tl.zeros((PIECE, PIECE), own.dtype)
    for first in range(0, KEYS, CHUNK):
        is_key = is_token[:, None] & (first + k < key_dim)[None, :]
        left = tl.load(left_ptr[:, None] + (first + k)[None, :], mask=is_key, other=0.0)
        right = tl.load(right_ptr[:, None] + (first + k)[None, :], mask=is_key, other=0.0)
        own += tl.sum(wide(left) * wide(left), 1)
        products += _dot(_operand(left, PRECISION), tl.trans(_operand(right, PRECISION)), PRECISION)
    return products, own


@jit
def _totals(
    gate_ptr: tl.tensor, log: tl.tensor, bias: tl.tensor, is_token: tl.tensor, heads: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (the write gate of each token, the logarithm of the decay from the start of the piece to it),
    [PIECE] each."""
    write = 1 / (1 + tl.exp(-wide(tl.load(gate_ptr, mask=is_token, other=0.0))))
    decay = kept_share(wide(tl.load(gate_ptr + heads, mask=is_token, other=0.0)), log, bias)
    return write, tl.cumsum(tl.where(is_token, decay, 0.0), 0)


@jit
def _between(totals: tl.tensor, PIECE: tl.constexpr) -> tl.tensor:
    """Returns the decay from token j to token i, [PIECE, PIECE]; 0 for j > i."""
    place = tl.arange(0, PIECE)
    difference = totals[:, None] - totals[None, :]
    is_earlier = place[:, None] >= place[None, :]
    return tl.where(is_earlier, tl.exp(tl.where(is_earlier, difference, 0.0)), 0.0)


@jit_once_for("gate_ptr", "first_ptr", "length_ptr", "generated_ptr", "num_spans", "num_tokens")
def _systems_kernel(
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    generated_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    number_ptr: tl.tensor,
    num_spans: tl.tensor,
    num_tokens: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    query_size: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    SHARING: tl.constexpr,
    SPANS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program computes a piece and a head of values; it searches the span of its piece."""
    piece, head = tl.program_id(0), tl.program_id(1)
    span = tl.arange(0, SPANS)
    has_span = span < num_spans
    is_generated = tl.load(generated_ptr + span, mask=has_span, other=1) != 0
    lengths = tl.where(is_generated, 0, tl.load(length_ptr + span, mask=has_span, other=0))
    ends = tl.cumsum((lengths + PIECE - 1) // PIECE, 0)
    own = tl.sum((ends <= piece).to(tl.int32), 0)
    if own < num_spans:
        length = tl.load(length_ptr + own)
        start = (piece - tl.sum(tl.where(span == own, ends - (lengths + PIECE - 1) // PIECE, 0), 0)) * PIECE
        place = tl.arange(0, PIECE)
        is_token = start + place < length
        token = tl.load(first_ptr + own).to(tl.int64) + start + place
        log, bias = tl.load(log_ptr + head), tl.load(bias_ptr + head)
        write, totals = _totals(gate_ptr + token * gate_stride + head, log, bias, is_token, heads)
        query_ptr = mixed_ptr + token * mixed_stride + head // SHARING * key_dim
        key_ptr, cell = query_ptr + query_size, (token * heads + head)[:, None] * PIECE + place[None, :]
        products, own_products = _products(key_ptr, key_ptr, is_token, key_dim, PIECE, KEYS, CHUNK, PRECISION)
        key_scale = tl.rsqrt(own_products + 1e-6)
        products *= (key_scale * write)[:, None] * key_scale[None, :]
        is_below = place[:, None] > place[None, :]
        inverse = -tl.where(is_below, products * _between(totals, PIECE), 0.0)
        for i in range(1, PIECE):
            is_row = place[:, None] == i
            row = tl.sum(tl.where(is_row, inverse, 0.0), 0)
            row += tl.sum(row[:, None] * inverse, 0)
            inverse = tl.where(is_row, row[None, :], inverse)
        inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        tl.store(inverse_ptr + cell, _operand(inverse, PRECISION), mask=is_token[:, None])
        seen, own_products = _products(query_ptr, key_ptr, is_token, key_dim, PIECE, KEYS, CHUNK, PRECISION)
        query_scale = tl.rsqrt(own_products + 1e-6) / tl.sqrt(key_dim.to(own_products.dtype))
        seen *= query_scale[:, None] * key_scale[None, :] * _between(totals, PIECE)
        tl.store(seen_ptr + cell, _operand(seen, PRECISION), mask=is_token[:, None])
        own_ptr, step = number_ptr + (token * heads + head), num_tokens.to(tl.int64) * heads
        tl.store(own_ptr, write, mask=is_token)
        tl.store(own_ptr + step, totals, mask=is_token)
        tl.store(own_ptr + 2 * step, key_scale, mask=is_token)
        tl.store(own_ptr + 3 * step, query_scale, mask=is_token)


@jit_once_for("id_ptr", "row_ptr", "first_ptr", "length_ptr", "generated_ptr", "num_tokens")
def _pieces_kernel(
    mixed_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    number_ptr: tl.tensor,
    state_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    generated_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    query_size: tl.tensor,
    mixed_stride: tl.tensor,
    SHARING: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program computes a span, a head of values and VALUES of its dimensions. Tiles of values are
    [VALUES, PIECE] and [VALUES, KEYS]."""
    span, head = tl.program_id(0), tl.program_id(1)
    length = tl.where(tl.load(generated_ptr + span) != 0, 0, tl.load(length_ptr + span))
    if length > 0:
        state_id = tl.load(id_ptr + tl.load(row_ptr + span)).to(tl.int64)
        first = tl.load(first_ptr + span).to(tl.int64)
        place, k = tl.arange(0, PIECE), tl.arange(0, KEYS)
        d = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        has_key, has_value = k < key_dim, d < value_dim
        is_cell = has_value[:, None] & has_key[None, :]
        tile_ptr = state_ptr + ((state_id * heads + head) * key_dim + k[None, :]) * value_dim + d[:, None]
        tile = tl.load(tile_ptr, mask=is_cell, other=0.0)
        # Offsets are relative to the piece's first token, so that 32 bits hold them, which saves registers.
        query_at = head // SHARING * key_dim + place[:, None] * mixed_stride + k[None, :]
        cell_at = head * PIECE + place[:, None] * (heads * PIECE) + place[None, :]
        value_at = 2 * query_size + head * value_dim + place[None, :] * mixed_stride + d[:, None]
        step = num_tokens.to(tl.int64) * heads
        for start in range(0, length, PIECE):
            begin = first + start
            is_token = start + place < length
            is_key, is_value = is_token[:, None] & has_key[None, :], has_value[:, None] & is_token[None, :]
            query_ptr = mixed_ptr + begin * mixed_stride + query_at
            keys = _operand(tl.load(query_ptr + query_size, mask=is_key, other=0.0), PRECISION)
            queries = _operand(tl.load(query_ptr, mask=is_key, other=0.0), PRECISION)
            values = wide(tl.load(mixed_ptr + begin * mixed_stride + value_at, mask=is_value, other=0.0))
            cells = begin * heads * PIECE + cell_at
            inverse = tl.load(inverse_ptr + cells, mask=is_token[:, None], other=0.0)
            seen = tl.load(seen_ptr + cells, mask=is_token[:, None], other=0.0)
            own_ptr = number_ptr + (begin + place) * heads + head
            write = tl.load(own_ptr, mask=is_token, other=0.0)
            totals = tl.load(own_ptr + step, mask=is_token, other=0.0)
            key_scale = tl.load(own_ptr + 2 * step, mask=is_token, other=0.0)
            query_scale = tl.load(own_ptr + 3 * step, mask=is_token, other=0.0)
            last = tl.sum(tl.where(place == tl.minimum(length - start, PIECE) - 1, totals, 0.0), 0)
            from_start, before = tl.exp(totals), _operand(tile, PRECISION)
            said = _dot(before, tl.trans(keys), PRECISION) * (key_scale * from_start)[None, :]
            changes = _operand((values - said) * write[None, :], PRECISION)
            changes = _dot(changes, tl.trans(inverse), PRECISION)
            result = _dot(before, tl.trans(queries), PRECISION) * (query_scale * from_start)[None, :]
            result += _dot(_operand(changes, PRECISION), tl.trans(seen), PRECISION)
            to_ptr = out_ptr + (begin * heads + head) * value_dim
            to_ptr += place[None, :] * (heads * value_dim) + d[:, None]
            tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=is_value)
            written = changes * (key_scale * tl.exp(last - totals))[None, :]
            tile = tile * tl.exp(last) + _dot(_operand(written, PRECISION), keys, PRECISION)
        tl.store(tile_ptr, tile, mask=is_cell)


def run_pieces(
    mixed: torch.Tensor,  # [tokens, channels]
    gates: torch.Tensor,  # [tokens, 2 * V]
    rule: DeltaRule,
    states: torch.Tensor,  # [entries, V, K, D], in place
    state_ids: torch.Tensor,  # [rows of the table] int64
    spans: TokenSpans,
    out: torch.Tensor,  # [tokens, V, D]
    piece_size: int,
) -> None:
    """Launches both kernels for the spans that are not generated."""
    check_dense(rule.decay_log, rule.decay_bias, states, state_ids, *spans, out)
    assert mixed.stride(1) == gates.stride(1) == 1, (mixed.stride(), gates.stride())
    heads, num_tokens, num_spans = rule.num_value_heads, len(mixed), len(spans.rows)
    # 16-bit inputs are multiplied as bfloat16, as in flash-linear-attention; float32 inputs in three TF32
    # parts, which together have about its precision. The interpreter has no bfloat16.
    precision = "ieee" if states.dtype == torch.float64 else "tf32x3"
    if mixed.dtype.itemsize == 2 and mixed.is_cuda:
        precision = "bf16"
    systems = _new_systems(rule, num_tokens, piece_size, states, is_narrow=precision == "bf16")
    most_values = _MAX_VALUES if precision == "bf16" else _MAX_WIDE_VALUES
    values = min(max(power_of_two(rule.value_dim), 16), most_values)
    sharing, keys = heads // rule.num_key_heads, max(power_of_two(rule.key_dim), 16)
    where = spans.first_tokens, spans.lengths, spans.is_generated
    most_pieces = min(num_tokens, num_tokens // piece_size + num_spans)
    _systems_kernel[(most_pieces, heads)](
        mixed, gates, rule.decay_log, rule.decay_bias, *where, *systems, num_spans, num_tokens, heads, rule.key_dim,
        rule.query_size, mixed.stride(0), gates.stride(0), SHARING=sharing, SPANS=searched_spans(state_ids, spans),
        PIECE=piece_size, KEYS=keys, CHUNK=min(keys, _CHUNK), PRECISION=precision, **_SYSTEM_OPTIONS,
    )  # fmt: skip
    _pieces_kernel[(num_spans, heads, blocks_of(rule.value_dim, values))](
        mixed, *systems, states, state_ids, spans.rows, *where, out, num_tokens, heads, rule.key_dim, rule.value_dim,
        rule.query_size, mixed.stride(0), SHARING=sharing, PIECE=piece_size, KEYS=keys, VALUES=values,
        PRECISION=precision, num_stages=_STAGES if precision == "bf16" else 1, **_PIECE_OPTIONS,
    )  # fmt: skip


def _new_systems(
    rule: DeltaRule, num_tokens: int, piece_size: int, states: torch.Tensor, *, is_narrow: bool
) -> _Systems:
    heads, device = rule.num_value_heads, states.device
    operands = torch.bfloat16 if is_narrow else states.dtype
    return _Systems(
        torch.empty(num_tokens, heads, piece_size, dtype=operands, device=device),
        torch.empty(num_tokens, heads, piece_size, dtype=operands, device=device),
        torch.empty(4, num_tokens, heads, dtype=states.dtype, device=device),
    )
