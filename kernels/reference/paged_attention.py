"""Causal attention of windows of queries over the paged cache (PyTorch twin).

Knows blocks and positions; the keys and values of the window are in the cache already.
"""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    scale: float,
    *,
    first_position: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window, q_heads, head_dim]: query w of a row sees keys first_position .. start + w.

    A query that sees no key gets zeros.
    """
    rows, window, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group = q_heads // kv_heads
    context = int(start_positions.max()) + window if rows > 0 else 0
    blocks = min(-(-context // block_size), block_table.shape[1])
    used = block_table[:, :blocks].clamp(min=0).flatten()
    shape = rows, blocks * block_size, kv_heads, head_dim
    keys = key_cache.index_select(0, used).view(shape).transpose(1, 2)
    values = value_cache.index_select(0, used).view(shape).transpose(1, 2)
    places = torch.arange(blocks * block_size, device=query.device)
    ends = start_positions[:, None] + torch.arange(window, device=query.device)
    is_visible = (places <= ends[..., None]) & (places >= first_position)
    mask = is_visible[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
    folded = query.view(rows, window, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    heads = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    heads = heads.masked_fill(~mask.any(-1, keepdim=True), 0)
    result = heads.view(rows, kv_heads, window, group, head_dim).permute(0, 2, 1, 3, 4)
    result = result.reshape(query.shape)
    return result if out is None else out.copy_(result)
