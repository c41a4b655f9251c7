"""Compiled rotary embedding and attention in float32 on an x86 CPU, for layers with integer weights.

In such layers the linear layers take little time, and the dozens of PyTorch operations of the twins would
dominate. The order of a query's sums depends on its number of visible keys alone, because tiles of keys begin
at its first key.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from headway.kernels.runtime._cpu_library import cpu_library
from headway.kernels.types._query_batch import QueryBatch
from headway.kernels.types._score_rule import ScoreRule

_LANES, _MAX_GROUP, _MAX_DIM = 8, 16, 256
_SOURCE = Path(__file__).with_name("cpu_attention.c")


def has_cpu_attention(head_dim: int, gqa_group_size: int, rule: ScoreRule) -> bool:
    """Returns whether this machine computes such attention in float32. Logs once what is missing."""
    is_plain = rule.soft_cap == 0 and rule.window == 0
    fits = head_dim % _LANES == 0 and head_dim <= _MAX_DIM and gqa_group_size <= _MAX_GROUP
    return is_plain and fits and _library() is not None


def cpu_rope_append(
    query: torch.Tensor,  # [tokens, q_heads, head_dim] float32, in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim] float32, in place
    value: torch.Tensor,  # [tokens, kv_heads, head_dim] float32
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, rotary_dim] float32
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim] float32, written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim] float32, written
    slot_mapping: torch.Tensor,  # [tokens] int64; -1: not written
) -> None:
    """Does what `rope_append` does without norms."""
    tokens, heads, dim = query.shape
    assert key.stride() == value.stride(), (key.stride(), value.stride())
    assert key.stride()[1:] == (dim, 1), key.stride()
    assert query.stride(2) == positions.stride(0) == slot_mapping.stride(0) == 1, "inner strides are 1"
    _loaded().rope_append(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *query.stride()[:2], key.stride(0),
        tokens, heads, key.shape[1], dim, positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1],
        key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
    )  # fmt: skip


def cpu_attention(
    query: torch.Tensor,  # [tokens, q_heads, head_dim] float32
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim] float32
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim] float32
    batch: QueryBatch,
    rule: ScoreRule,
    *,
    out: torch.Tensor,  # [tokens, q_heads, head_dim] float32
) -> None:
    """Writes the result of `attention` to out. Requires `has_cpu_attention`."""
    assert isinstance(batch.lengths, int), "on a CPU the host knows the chunks' lengths"
    _, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    own, table = query[batch.tokens], batch.block_table
    starts = batch.start_positions
    assert table.dtype == starts.dtype == torch.int64, (table.dtype, starts.dtype)
    assert starts.is_contiguous()
    assert out.is_contiguous()
    assert own.stride(2) == table.stride(1) == 1, "inner strides are 1"
    _loaded().attention(
        own.data_ptr(), *own.stride()[:2], key_cache.data_ptr(), value_cache.data_ptr(),
        table.data_ptr(), table.stride(0), table.shape[1], starts.data_ptr(), out[batch.tokens].data_ptr(),
        len(table), batch.lengths, kv_heads, heads // kv_heads, dim, block_size, rule.first_position,
        rule.scale, torch.get_num_threads(),
    )  # fmt: skip


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert library is not None, "a layer uses this where `has_cpu_attention`"
    return library


@cache
def _library() -> ctypes.CDLL | None:
    library = cpu_library(_SOURCE)
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        library.attention.argtypes = (
            pointer, size, size, pointer, pointer, pointer, size, size, pointer, pointer, *[size] * 7,
            ctypes.c_float, ctypes.c_int,
        )  # fmt: skip
        library.attention.restype = None
        library.rope_append.argtypes = (
            pointer, pointer, pointer, *[size] * 7, pointer, pointer, size, pointer, pointer, pointer
        )  # fmt: skip
        library.rope_append.restype = None
    return library
