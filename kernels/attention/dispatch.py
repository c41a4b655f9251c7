"""Chooses the kernel of attention from sizes: pure functions that know no tensors.

The thresholds were measured on an H200.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

# More query rows of a KV head (queries times GQA group size) fill the tensor cores without split-KV.
MAX_SPLIT_KV_ROWS = 128
# A program of split-KV computes a tile of up to this number of query rows.
SPLIT_KV_TILE_ROWS = 32
# A program that walks through all keys takes too long where more keys are cached before the queries.
MAX_WALKED_KEYS = 8192
# A launch of split-KV leaves partial results for each query: those of 256 queries of a 7B model take 4 MiB for each 2,048
# places of a row's block table. Longer tables allow fewer queries of prompts in a launch.
_MAX_SPLIT_KV_QUERIES, _LONG_TABLE_KEYS = 256, 32_768
# One chunk of at most this number of tokens is attended as a window, so that split-KV shares its keys out among programs.
_MAX_PADDED_WINDOW = 32


class AttentionKernel(Enum):
    """The kernels of attention."""

    SPLIT_KV = auto()
    PREFILL = auto()
    VARLEN = auto()


class AttentionShape(NamedTuple):
    """Sizes of a QueryBatch and its heads."""

    window: int | None  # queries of every row; None: the device alone knows them
    gqa_group_size: int
    most_cached: int | None  # of QueryBatch


def choose(shape: AttentionShape) -> AttentionKernel:
    """Returns the kernel of a launch."""
    if shape.window is None:
        return AttentionKernel.VARLEN
    is_wide = shape.window > max_split_kv_window(shape.gqa_group_size)
    if is_wide or not splits_keys(shape.most_cached):
        return AttentionKernel.PREFILL
    return AttentionKernel.SPLIT_KV


def splits_keys(most_cached: int | None) -> bool:
    """Returns whether that number of cached keys is shared out among programs; None: the number is not known."""
    return most_cached is None or most_cached > MAX_WALKED_KEYS


def max_split_kv_window(gqa_group_size: int) -> int:
    """Returns the most queries of a row that split-KV takes."""
    return MAX_SPLIT_KV_ROWS // gqa_group_size


def max_prompt_rows(window: int, gqa_group_size: int, most_cached: int | None, max_keys: int) -> int | None:
    """Returns the most rows of prompts in one launch; None: any number. max_keys: places of a row's block table."""
    if choose(AttentionShape(window, gqa_group_size, most_cached)) is not AttentionKernel.SPLIT_KV:
        return None
    queries = _MAX_SPLIT_KV_QUERIES * _LONG_TABLE_KEYS // max(max_keys, _LONG_TABLE_KEYS)
    return max(queries // window, 1)


class PaddedForm(Enum):
    """The forms of prompt chunks in a captured graph."""

    WINDOW = auto()  # one chunk, a row of all tokens of the graph
    CHUNKS = auto()  # chunks whose number and lengths only the device knows


def padded_form(num_chunks: int, num_tokens: int, most_cached: int) -> PaddedForm | None:
    """Returns the form of chunks in a graph with room for num_tokens; None: a graph saves less than split-KV does."""
    if num_chunks == 1 and num_tokens <= _MAX_PADDED_WINDOW:
        return PaddedForm.WINDOW
    return None if splits_keys(most_cached) else PaddedForm.CHUNKS
