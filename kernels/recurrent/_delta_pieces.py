"""The chunked form of the gated delta rule in two launches: what pieces need of their own tokens alone, all at once; then the
pieces of each span one after the other.

Within a piece token i writes what its value differs by from what the state says then, a triangular system over the tokens
before it. The first launch inverts the system; the second one applies it. A piece that is not full has zeros beyond.
"""

from __future__ import annotations

import torch

from headway.kernels.recurrent._delta_steps import kept_share
from headway.kernels.recurrent._spans import searched_spans
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, jit_once_for, power_of_two, tl
from headway.kernels.types._delta_rule import DeltaRule, TokenSpans

_MAX_VALUES = 32  # of the state's tile
# Each thread would fuse a product of its own with the sums of others, and threads would disagree about the sum.
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 8, "num_stages": 1}


@jit
def _dot(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """a @ b in float32 or float64, of operands rounded to bfloat16 if PRECISION is "bf16"."""
    if PRECISION == "bf16":
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@jit
def _units(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """[PIECE, KEYS] in float32 or float64: vectors divided by their lengths."""
    vectors = wide(tl.load(pointers, mask=mask, other=0.0))
    return vectors * tl.rsqrt(tl.sum(vectors * vectors, 1) + 1e-6)[:, None]


@jit
def _totals(
    gate_ptr: tl.tensor, log: tl.tensor, bias: tl.tensor, is_token: tl.tensor, heads: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """How much each token writes, and the logarithm of what is kept from before the piece up to it, [PIECE] each."""
    write = 1 / (1 + tl.exp(-wide(tl.load(gate_ptr, mask=is_token, other=0.0))))
    decay = kept_share(wide(tl.load(gate_ptr + heads, mask=is_token, other=0.0)), log, bias)
    return write, tl.cumsum(tl.where(is_token, decay, 0.0), 0)


@jit
def _between(totals: tl.tensor, PIECE: tl.constexpr) -> tl.tensor:
    """[PIECE, PIECE]: what token i keeps of what token j <= i wrote; 0 for later ones."""
    place = tl.arange(0, PIECE)
    difference = totals[:, None] - totals[None, :]
    is_earlier = place[:, None] >= place[None, :]
    return tl.where(is_earlier, tl.exp(tl.where(is_earlier, difference, 0.0)), 0.0)


@jit_once_for("gate_ptr", "first_ptr", "length_ptr", "generated_ptr", "num_spans")
def _inverses_kernel(
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    generated_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    num_spans: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    query_size: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    SHARING: tl.constexpr,
    SPANS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program a piece and head of values; it looks for the span of its piece."""
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
        place, k = tl.arange(0, PIECE), tl.arange(0, KEYS)
        is_token = start + place < length
        token = tl.load(first_ptr + own).to(tl.int64) + start + place
        key_ptr = (
            mixed_ptr + token[:, None] * mixed_stride + query_size + head // SHARING * key_dim + k[None, :]
        )
        keys = _units(key_ptr, is_token[:, None] & (k < key_dim)[None, :])
        log, bias = tl.load(log_ptr + head), tl.load(bias_ptr + head)
        write, totals = _totals(gate_ptr + token * gate_stride + head, log, bias, is_token, heads)
        products = _dot(keys * write[:, None], tl.trans(keys), PRECISION)
        is_below = place[:, None] > place[None, :]
        system = tl.where(is_below, products * _between(totals, PIECE), 0.0)
        inverse = -system
        for i in range(1, PIECE):
            is_row = place[:, None] == i
            row = tl.sum(tl.where(is_row, inverse, 0.0), 0)
            row += tl.sum(row[:, None] * inverse, 0)
            inverse = tl.where(is_row, row[None, :], inverse)
        inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        to_ptr = inverse_ptr + (token * heads + head)[:, None] * PIECE + place[None, :]
        tl.store(to_ptr, inverse, mask=is_token[:, None])


@jit_once_for("gate_ptr", "id_ptr", "row_ptr", "first_ptr", "length_ptr", "generated_ptr")
def _pieces_kernel(
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    state_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    generated_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    query_size: tl.tensor,
    mixed_stride: tl.tensor,
    gate_stride: tl.tensor,
    SHARING: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program a span, head of values and VALUES of its dimensions."""
    span, head = tl.program_id(0), tl.program_id(1)
    length = tl.where(tl.load(generated_ptr + span) != 0, 0, tl.load(length_ptr + span))
    if length > 0:
        state_id = tl.load(id_ptr + tl.load(row_ptr + span)).to(tl.int64)
        first = tl.load(first_ptr + span).to(tl.int64)
        place, k, d = (
            tl.arange(0, PIECE),
            tl.arange(0, KEYS),
            tl.program_id(2) * VALUES + tl.arange(0, VALUES),
        )
        has_key, has_value = k < key_dim, d < value_dim
        tile_ptr = state_ptr + ((state_id * heads + head) * key_dim + k[:, None]) * value_dim + d[None, :]
        tile = tl.load(tile_ptr, mask=has_key[:, None] & has_value[None, :], other=0.0)
        log, bias = tl.load(log_ptr + head), tl.load(bias_ptr + head)
        scale = 1 / tl.sqrt(key_dim.to(tile.dtype))
        for start in range(0, length, PIECE):
            is_token = start + place < length
            is_key, is_value = is_token[:, None] & has_key[None, :], is_token[:, None] & has_value[None, :]
            # Places count from the piece's first token: 32 bits hold them, and registers are few.
            begin = first + start
            query_ptr = mixed_ptr + begin * mixed_stride + head // SHARING * key_dim
            keys = _units(query_ptr + query_size + (place[:, None] * mixed_stride + k[None, :]), is_key)
            value_ptr = mixed_ptr + begin * mixed_stride + 2 * query_size + head * value_dim
            value_ptr += place[:, None] * mixed_stride + d[None, :]
            values = wide(tl.load(value_ptr, mask=is_value, other=0.0))
            own_gate_ptr = gate_ptr + begin * gate_stride + head + place * gate_stride
            write, totals = _totals(own_gate_ptr, log, bias, is_token, heads)
            own_ptr = inverse_ptr + (begin * heads + head) * PIECE
            own_ptr += place[:, None] * (heads * PIECE) + place[None, :]
            inverse = tl.load(own_ptr, mask=is_token[:, None], other=0.0)
            from_start = tl.exp(totals)
            said = _dot(keys, tile, PRECISION)
            changes = (values - said * from_start[:, None]) * write[:, None]
            changes = _dot(inverse, changes, PRECISION)
            queries = _units(query_ptr + (place[:, None] * mixed_stride + k[None, :]), is_key) * scale
            result = _dot(queries, tile, PRECISION) * from_start[:, None]
            seen = _dot(queries, tl.trans(keys), PRECISION) * _between(totals, PIECE)
            result += _dot(seen, changes, PRECISION)
            to_ptr = out_ptr + (begin * heads + head) * value_dim
            to_ptr += place[:, None] * (heads * value_dim) + d[None, :]
            tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=is_value)
            last = tl.sum(tl.where(place == PIECE - 1, totals, 0.0), 0)
            written = keys * tl.exp(last - totals)[:, None]
            tile = tile * tl.exp(last) + _dot(tl.trans(written), changes, PRECISION)
        tl.store(tile_ptr, tile, mask=has_key[:, None] & has_value[None, :])


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
    heads, num_spans = rule.num_value_heads, len(spans.rows)
    inverses = torch.empty(len(mixed), heads, piece_size, dtype=states.dtype, device=mixed.device)
    # 16-bit inputs are multiplied as such, as by flash-linear-attention; float32 in three parts, which together keep about
    # its precision. The interpreter has no bfloat16.
    precision = "ieee" if states.dtype == torch.float64 else "tf32x3"
    if mixed.dtype.itemsize == 2 and mixed.is_cuda:
        precision = "bf16"
    values = min(max(power_of_two(rule.value_dim), 16), _MAX_VALUES)
    sharing, keys = heads // rule.num_key_heads, max(power_of_two(rule.key_dim), 16)
    given = mixed, gates, rule.decay_log, rule.decay_bias
    where = spans.first_tokens, spans.lengths, spans.is_generated
    most_pieces = min(len(mixed), len(mixed) // piece_size + num_spans)
    _inverses_kernel[(most_pieces, heads)](
        *given, *where, inverses, num_spans, heads, rule.key_dim, rule.query_size, mixed.stride(0),
        gates.stride(0), SHARING=sharing, SPANS=searched_spans(state_ids, spans), PIECE=piece_size, KEYS=keys,
        PRECISION=precision, **_OPTIONS,
    )  # fmt: skip
    _pieces_kernel[(num_spans, heads, blocks_of(rule.value_dim, values))](
        *given, inverses, states, state_ids, spans.rows, *where, out, heads, rule.key_dim, rule.value_dim,
        rule.query_size, mixed.stride(0), gates.stride(0), SHARING=sharing, PIECE=piece_size, KEYS=keys,
        VALUES=values, PRECISION=precision, **_OPTIONS,
    )  # fmt: skip
