"""The entry point to attention over the paged KV cache: `attention`."""

from __future__ import annotations

import torch

from headway.kernels.attention.dispatch import is_split_kv
from headway.kernels.attention.paged_attention import paged_attention
from headway.kernels.attention.prefill_attention import prefill_attention
from headway.kernels.attention.varlen_attention import varlen_attention
from headway.kernels.types._query_batch import QueryBatch
from headway.kernels.types._score_rule import ScoreRule


def attention(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    batch: QueryBatch,
    rule: ScoreRule,
    *,
    out: torch.Tensor | None = None,  # [tokens, q_heads, head_dim]
) -> torch.Tensor:
    """Computes causal grouped-query attention (GQA): each query attends to the keys of its row that the rule
    makes visible.

    query and out hold the whole flat list of tokens; only the tokens of the batch are read and written.
    Returns out, or a new tensor. A query that sees no key gets zeros; padding is not written. A row has no
    keys from its end position on: memory there may hold anything. The block table, start and end positions
    must have been written before the preceding launch, because they are read before that launch has ended
    (programmatic dependent launch, PDL). The kernel is chosen in dispatch.py; all kernels give the same bits.
    """
    result = torch.empty_like(query) if out is None else out
    queries, results = query[batch.tokens], result[batch.tokens]
    if not isinstance(batch.lengths, int):
        assert batch.first_tokens is not None, "chunks that only the device knows need their first tokens"
        varlen_attention(
            queries, key_cache, value_cache, batch.block_table, batch.first_tokens, batch.lengths,
            batch.start_positions, rule, out=results,
        )  # fmt: skip
        return result
    gqa_group_size = query.shape[1] // key_cache.shape[2]
    is_split = is_split_kv(batch.lengths, gqa_group_size, batch.most_cached)
    rows = len(batch.block_table), batch.lengths, *query.shape[1:]
    attend = paged_attention if is_split else prefill_attention
    attend(
        queries.view(rows), key_cache, value_cache, batch.block_table, batch.start_positions, rule,
        end_positions=batch.end_positions, out=results.view(rows),
    )  # fmt: skip
    return result
