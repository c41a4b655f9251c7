"""Causal attention of windows of queries over the paged KV cache with split-KV (FlashDecoding): the launcher
of its two kernels.

_split_kv_plan.py explains the division of work, _key_tiles.py why no result depends on it.
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import check_attention, score_factors
from headway.kernels.attention._key_tiles import OPTIONS
from headway.kernels.attention._split_kv_combine import _combine_kernel
from headway.kernels.attention._split_kv_partial import _partial_kernel
from headway.kernels.attention.dispatch import (
    WIDE_CACHE_SIZE,
    split_kv_config,
    split_kv_keys,
    split_kv_partials,
)
from headway.kernels.reference.attention.paged_attention import paged_attention as paged_attention_twin
from headway.kernels.runtime._device import multiprocessors, overlap
from headway.kernels.runtime._triton import blocks_of, takes_triton
from headway.kernels.types._score_rule import ScoreRule

_STAGES = 2
# The second kernel loads this number of groups at a time; a warp combines this number of columns.
_SUMMED_GROUPS, _COMBINED_BY_A_WARP = 4, 64


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

    A query that sees no key gets zeros. A row has no keys from its end position on: memory there may hold
    anything. The block table, start and end positions must have been written before the preceding launch,
    because they are read before that has ended (PDL). See dispatch.py for the widest window.
    """
    if not takes_triton(query) or query.dtype == torch.float64:
        return paged_attention_twin(
            query, key_cache, value_cache, block_table, start_positions, rule,
            end_positions=end_positions, out=out,
        )  # fmt: skip
    result = torch.empty_like(query) if out is None else out
    if query.shape[0] > 0:
        _attend(query, key_cache, value_cache, block_table, start_positions, rule, end_positions, result)
    return result


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start_positions: torch.Tensor,
    rule: ScoreRule,
    end_positions: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    check_attention(query, key_cache, value_cache, out)
    rows, window, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    max_blocks = block_table.shape[1]
    scale, slope, sliding_window = score_factors(rule)
    max_keys = split_kv_keys(max_blocks * block_size, window, sliding_window, head_dim, query.element_size())
    config = split_kv_config(
        rows, window, (q_heads, kv_heads), head_dim, query.element_size(),
        max_keys=max_keys, num_multiprocessors=multiprocessors(query.device),
    )  # fmt: skip
    num_partials = split_kv_partials(config, window, q_heads)
    acc = torch.empty(num_partials * head_dim, dtype=torch.float32, device=query.device)
    m, l_sums = torch.empty(2, num_partials, dtype=torch.float32, device=query.device)
    overlaps, launch = overlap(query.device)
    extent = rows, max_blocks
    visible = rule.first_position, sliding_window, window, *config.costs
    shape = {
        "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "ROWS": config.scanned_rows,
        "TILE": config.tile, "QUAD": config.quad, "GROUP": config.group, "HAS_ENDS": end_positions is not None, "OVERLAPS": overlaps,
    }  # fmt: skip
    ends = start_positions if end_positions is None else end_positions
    _partial_kernel[(config.num_programs,)](
        query, key_cache, value_cache, block_table, start_positions, ends, out, acc, m, l_sums,
        *extent, scale, slope, *visible, *query.stride()[:3], *key_cache.stride()[:3],
        block_table.stride(0), *out.stride()[:3], GQA_GROUP_SIZE=q_heads // kv_heads, KV_HEADS=kv_heads,
        QUERIES=config.queries, PARTS=config.parts, IS_WIDE=key_cache.numel() >= WIDE_CACHE_SIZE, **shape, num_warps=config.num_warps, num_stages=_STAGES,
        **OPTIONS, **launch,
    )  # fmt: skip
    _combine_kernel[(rows * window, blocks_of(q_heads, config.heads_per_program))](
        acc, m, l_sums, start_positions, ends, out, *extent, *visible, config.heads_per_program, *out.stride()[:3],
        HEADS=q_heads, GROUPS=_SUMMED_GROUPS, **shape, num_warps=blocks_of(head_dim, _COMBINED_BY_A_WARP), **OPTIONS, **launch,
    )  # fmt: skip
