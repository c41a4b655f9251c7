"""Causal attention of windows of queries over the paged cache (PyTorch twin).

Knows blocks and positions; the keys and values of the window are in the cache already. In float32 a query's
result does not depend on the window or the rows that it is computed with: see `_gathered_context`.
"""

from __future__ import annotations

import torch

from headway.kernels.types._score_rule import ScoreRule

# Matrix products of fewer rows take another code path, which rounds differently: with AVX-512 products of up
# to 4 rows of 96 or 128 numbers, and of up to 8 rows of more numbers.
_QUERY_MULTIPLE = 16
# PyTorch's fused attention starts a new sum every _CHUNK keys. MKL sums up to _WHOLE of these without a
# split; where it splits longer sums depends on their length and on the processor.
_WHOLE, _CHUNK = 192, 512
# Bytes of keys and values that are gathered at a time, for each thread. They are read again while the
# thread's cache holds them, and the allocator reuses that much memory instead of mapping it anew at every
# call.
_GATHERED_BYTES = 2**20


def paged_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    rule: ScoreRule,
    *,
    end_positions: torch.Tensor | None = None,  # [rows] int64
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [rows, window, q_heads, head_dim]: query w of a row attends to the keys up to position start +
    w that the rule makes visible.

    A query that sees no key gets zeros. A row has no keys from its end position on: in float16 memory there
    may hold anything; wider types do not overflow to NaN, so that their memory is not masked.
    """
    rows, window, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group = q_heads // kv_heads
    result = torch.empty_like(query) if out is None else out
    if rows == 0:
        return result
    first_block = _blocks_before_windows(int(start_positions.min()), rule.window, block_size)
    blocks = -(-_gathered_context(int(start_positions.max()) + window) // block_size)
    table = block_table[:, first_block:blocks]
    num_gathered = blocks - first_block
    used = torch.nn.functional.pad(table.clamp(min=0), (0, num_gathered - table.shape[1]))
    first_of_run = _first_of_run(table, num_gathered, len(key_cache)) if rows == 1 else None

    ends = start_positions[:, None] + torch.arange(window, device=query.device)
    places = torch.arange(first_block * block_size, blocks * block_size, device=query.device)
    # The heads of a GQA group become further queries.
    mask = _visible(places, ends, rule)[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
    folded = query.view(rows, window, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    padding = -window * group % _QUERY_MULTIPLE
    if padding:
        folded = torch.nn.functional.pad(folded, (0, 0, 0, padding))
        mask = torch.nn.functional.pad(mask, (0, 0, 0, padding), value=True)
    step = _rows_at_once(num_gathered * key_cache[0].nbytes)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        if first_of_run is None:
            keys, values = (_gathered(cache, used[some]) for cache in (key_cache, value_cache))
        else:
            run = slice(first_of_run, first_of_run + num_gathered)
            keys, values = (c[run].flatten(0, 1)[None].transpose(1, 2) for c in (key_cache, value_cache))
        if query.dtype == torch.float16:
            # A model may overflow in float16, and 0 * NaN is NaN: values of other requests must be cleared.
            last = ends[some, -1:] if end_positions is None else end_positions[some, None] - 1
            is_foreign = ((places > last) | (places < rule.first_position))[:, None, :, None]
            keys, values = keys.masked_fill(is_foreign, 0), values.masked_fill(is_foreign, 0)
        heads = _attended(folded[some], keys, values, mask[some], rule)
        by_window = heads[:, :, : window * group].view(len(heads), kv_heads, window, group, head_dim)
        by_window = by_window.transpose(1, 2)
        result[some].copy_(by_window.flatten(2, 3))
    if rule.first_position > int(start_positions.min()):
        result.masked_fill_((ends < rule.first_position)[..., None, None], 0)
    return result


def _visible(
    places: torch.Tensor,  # [keys] int64
    ends: torch.Tensor,  # [rows, queries] int64: the positions of the queries
    rule: ScoreRule,
) -> torch.Tensor:
    """Returns whether each query sees each key, [rows, queries, keys] bool."""
    is_visible = places <= ends[..., None]
    if rule.first_position > 0:
        is_visible &= places >= rule.first_position
    if rule.window > 0:
        is_visible &= places > ends[..., None] - rule.window
    return is_visible


def _attended(
    query: torch.Tensor,  # [rows, kv_heads, queries, head_dim]
    keys: torch.Tensor,  # [rows, kv_heads, keys, head_dim]
    values: torch.Tensor,  # [rows, kv_heads, keys, head_dim]
    mask: torch.Tensor,  # [rows, 1, queries, keys] bool
    rule: ScoreRule,
) -> torch.Tensor:
    """Returns [rows, kv_heads, queries, head_dim]; PyTorch's fused attention has no soft cap."""
    if rule.soft_cap > 0:
        return _attended_with_soft_cap(query, keys, values, mask, rule)
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=rule.scale)


def _attended_with_soft_cap(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Sums _CHUNK keys at a time as PyTorch's fused attention does, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    highest, total = (query.new_full((*query.shape[:3], 1), n, dtype=wide) for n in (-torch.inf, 0))
    sums = torch.zeros_like(query, dtype=wide)
    for first in range(0, keys.shape[2], _CHUNK):
        own = slice(first, first + _CHUNK)
        scores = query.to(wide) @ keys[:, :, own].to(wide).transpose(2, 3)
        scores = scores.mul_(rule.scale / rule.soft_cap).tanh_().mul_(rule.soft_cap)
        scores.masked_fill_(~mask[..., own], -torch.inf)
        before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
        base = highest.masked_fill(highest == -torch.inf, 0)
        weights, old = scores.sub_(base).exp_(), (before - base).exp_()
        # A product sums in one order for any number of keys.
        total = total * old + (weights @ weights.new_ones(weights.shape[-1], _QUERY_MULTIPLE))[..., :1]
        sums = sums * old + weights @ values[:, :, own].to(wide)
    return (sums / total.masked_fill(total == 0, 1)).to(query.dtype)


def _rows_at_once(row_bytes: int) -> int:
    """Returns the number of rows to compute at a time, given the bytes of gathered keys of one row. 16 rows
    of 330 keys (2 heads x 64, float32) take 1.9 ms four at a time, 2.6 ms to 5 ms all at once."""
    return max(1, torch.get_num_threads() * _GATHERED_BYTES // max(1, 2 * row_bytes))


def _gathered(
    cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_ids: torch.Tensor,  # [rows, blocks] int32 or int64
) -> torch.Tensor:
    """Returns the blocks of each row, [rows, kv_heads, blocks * block_size, head_dim]."""
    blocks = cache.index_select(0, block_ids.flatten())
    return blocks.view(len(block_ids), -1, *cache.shape[2:]).transpose(1, 2)


def _first_of_run(block_table: torch.Tensor, blocks: int, num_blocks: int) -> int | None:
    """Returns the first block of a single row whose blocks are consecutive in the cache, so that they need
    not be gathered; None if they are not. The blocks after the row's own belong to other requests; no query
    sees them."""
    ids: list[int] = block_table[0, :blocks].tolist()
    own = ids.index(-1) if -1 in ids else len(ids)
    first = ids[0] if ids else -1
    if own == 0 or first + blocks > num_blocks or ids[:own] != list(range(first, first + own)):
        return None
    return first


def _gathered_context(context: int) -> int:
    """Returns the number of positions to gather so that the sum over any query's keys is split at the same
    positions. Gathered keys that a query does not see add exact zeros; only the positions of the splits
    matter."""
    tail = context % _CHUNK
    return context - tail + _CHUNK if tail > _WHOLE else context


def _blocks_before_windows(start: int, window: int, block_size: int) -> int:
    """Returns the number of blocks before the windows of all queries from `start` on, in multiples of _CHUNK
    keys: they would change no sum."""
    before = max(start - window + 1, 0) if window > 0 else 0
    return before // _CHUNK * _CHUNK // block_size if _CHUNK % block_size == 0 else 0
