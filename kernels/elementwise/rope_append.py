"""RMSNorm and rotary position embedding (RoPE) of queries and keys, and the keys and values to the paged KV
cache, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.rope_append import rope_append as rope_append_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl
from headway.kernels.types._head_norms import HeadNorms

# With fusion a thread would fuse the square that it adds to another thread's sum, and their sums would
# differ.
_OPTIONS = {"enable_fp_fusion": False}


@jit
def _rope_append_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    position_ptr: tl.tensor,
    table_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    query_norm_ptr: tl.tensor,
    key_norm_ptr: tl.tensor,
    half: tl.tensor,
    head_dim: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_token_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    EPSILON: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """For each token one program rotates the query heads, another the key heads, and a third copies the
    values. half: half the number of rotated dimensions. REST: a power of two that is not below the number of
    the others; 0: all dimensions are rotated."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column, head = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    is_inside = column < half
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn_ptr = table_ptr + tl.load(position_ptr + token) * 2 * half + column
    cos = tl.load(turn_ptr, mask=is_inside, other=0.0)
    sin = tl.load(turn_ptr + half, mask=is_inside, other=0.0)
    if part == 0:
        head_ptr = query_ptr + token * q_token_stride + head * q_head_stride
        _turn(
            head_ptr, query_norm_ptr, half, head_dim, cos, sin, head < q_heads,
            EPSILON, HAS_NORMS, UNIT_OFFSET, HALF, REST,
        )  # fmt: skip
    else:
        slot = tl.load(slot_ptr + token)
        has_head = head < kv_heads
        mask = has_head & is_inside & (slot >= 0)
        from_offset = token * kv_token_stride + head * kv_head_stride
        to_offset = (slot * kv_heads + head) * head_dim
        if part == 1:
            first, second, rest = _turn(
                key_ptr + from_offset, key_norm_ptr, half, head_dim, cos, sin, has_head,
                EPSILON, HAS_NORMS, UNIT_OFFSET, HALF, REST,
            )  # fmt: skip
            to_ptr = key_cache_ptr + to_offset
        else:
            from_ptr = value_ptr + from_offset
            first = tl.load(from_ptr + column, mask=mask)
            second = tl.load(from_ptr + half + column, mask=mask)
            rest = _rest_of(from_ptr, half, head_dim, has_head, first, REST)
            to_ptr = value_cache_ptr + to_offset
        tl.store(to_ptr + column, first, mask=mask)
        tl.store(to_ptr + half + column, second, mask=mask)
        if REST > 0:
            after = 2 * half + tl.arange(0, REST)[None, :]
            tl.store(to_ptr + after, rest, mask=has_head & (after < head_dim) & (slot >= 0))


@jit
def _turn(
    head_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    half: tl.tensor,
    head_dim: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    has_head: tl.tensor,
    EPSILON: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Norms and rotates heads in place. Returns both rotated halves and the remaining dimensions."""
    column = tl.arange(0, HALF)[None, :]
    is_inside = column < half
    mask = has_head & is_inside
    first = tl.load(head_ptr + column, mask=mask, other=0.0)
    second = tl.load(head_ptr + half + column, mask=mask, other=0.0)
    rest = _rest_of(head_ptr, half, head_dim, has_head, first, REST)
    if HAS_NORMS:
        squares = tl.sum(wide(first) * wide(first) + wide(second) * wide(second), 1)
        if REST > 0:
            squares += tl.sum(wide(rest) * wide(rest), 1)
        factor = tl.rsqrt(squares / head_dim + EPSILON)[:, None]
        first = _weighted(first, factor, norm_ptr + column, is_inside, UNIT_OFFSET)
        second = _weighted(second, factor, norm_ptr + half + column, is_inside, UNIT_OFFSET)
        if REST > 0:
            after = 2 * half + tl.arange(0, REST)[None, :]
            rest = _weighted(rest, factor, norm_ptr + after, after < head_dim, UNIT_OFFSET)
            tl.store(head_ptr + after, rest, mask=has_head & (after < head_dim))
    # Explicit fused operations, as in qkv_rope_append.py: otherwise the compiler chooses which product it
    # fuses.
    turned_first = tl.fma(wide(first), cos, -(wide(second) * sin)).to(first.dtype)
    turned_second = tl.fma(wide(second), cos, wide(first) * sin).to(first.dtype)
    tl.store(head_ptr + column, turned_first, mask=mask)
    tl.store(head_ptr + half + column, turned_second, mask=mask)
    return turned_first, turned_second, rest


@jit
def _rest_of(
    head_ptr: tl.tensor,
    half: tl.tensor,
    head_dim: tl.tensor,
    has_head: tl.tensor,
    other: tl.tensor,
    REST: tl.constexpr,
) -> tl.tensor:
    """Returns the dimensions that are not rotated, [HEADS, REST]; if all are, `other` as a placeholder."""
    rest = other
    if REST > 0:
        after = 2 * half + tl.arange(0, REST)[None, :]
        rest = tl.load(head_ptr + after, mask=has_head & (after < head_dim), other=0.0)
    return rest


@jit
def _weighted(
    value: tl.tensor, factor: tl.tensor, weight_ptr: tl.tensor, mask: tl.tensor, UNIT_OFFSET: tl.constexpr
) -> tl.tensor:
    """Returns the values times the factor and the weight, rounded as in `rms_norm`."""
    weight = wide(tl.load(weight_ptr, mask=mask, other=0.0))
    normed = wide(value) * factor
    if UNIT_OFFSET:
        normed *= 1 + weight
    else:
        normed = wide(normed.to(value.dtype)) * weight
    return normed.to(value.dtype)


def rope_append(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, rotary_dim] float32 or float64: cosines, then sines
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    *,
    norms: HeadNorms | None = None,
) -> None:
    """Norms each head if norms are given, rotates its first rotary_dim dimensions, and writes keys and values
    to their slots of the cache."""
    if not takes_triton(query):
        rope_append_twin(
            query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping, norms=norms
        )
        return
    check_dense(positions, cos_sin, key_cache, value_cache, slot_mapping)
    tokens, q_heads, head_dim = query.shape
    kv_heads, half = key.shape[1], cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    assert rest >= 0, f"{2 * half} dimensions turn, a head has {head_dim}"
    assert query.stride(2) == key.stride(2) == 1, (query.stride(), key.stride())
    assert key.stride() == value.stride(), (key.stride(), value.stride())
    weights = (query, query) if norms is None else (norms.query, norms.key)
    if norms is not None:
        check_dense(*weights)
    if tokens > 0:
        overlaps, launch = overlap(query.device)
        _rope_append_kernel[(tokens, 3)](
            query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping, *weights,
            half, head_dim, q_heads, kv_heads, *query.stride()[:2], *key.stride()[:2],
            EPSILON=0.0 if norms is None else norms.epsilon, HAS_NORMS=norms is not None,
            UNIT_OFFSET=norms is not None and norms.unit_offset, HEADS=power_of_two(max(q_heads, kv_heads)),
            HALF=power_of_two(half), REST=power_of_two(rest) if rest > 0 else 0, OVERLAPS=overlaps,
            num_warps=4 if query.element_size() == 2 else 8, **_OPTIONS, **launch,
        )  # fmt: skip
