"""Rows of a round as lists, and what a round promises of each, one after the other."""

from __future__ import annotations

import random
from dataclasses import fields

import torch

from headway.kernels import RowState

RUBBISH = -123_456
MAX_BLOCKS = 6


def random_rows(
    num_rows: int, block_size: int, max_depth: int, seed: int, device: torch.device | str
) -> RowState:
    """Returns rows with lengths around every boundary of blocks; a third of the rows is padding full of
    rubbish."""
    draw = random.Random(seed)
    columns: dict[str, list[object]] = {field.name: [] for field in fields(RowState)}
    for row in range(num_rows):
        limit = draw.randint(2, MAX_BLOCKS * block_size)
        length = draw.randint(1, limit - 1)
        blocks = -(-length // block_size)
        needed = -(-min(limit, length + max_depth + 1) // block_size)
        granted = [100 * row + i + 1 if i < needed + row % 2 else -1 for i in range(MAX_BLOCKS)]
        values: dict[str, object] = {
            "last_tokens": draw.randint(0, 9),
            "kv_lengths": length,
            "limits": limit,
            "depth_caps": draw.randint(0, max_depth),
            "last_block_offsets": (length - 1) % block_size,
            "block_counts": blocks,
            "last_block_ids": granted[blocks - 1],
            "kv_block_ids": [granted[i] if i < blocks else -1 for i in range(MAX_BLOCKS)],
            "granted_block_ids": granted,
            "prefill_status": draw.randint(0, 1),
            "pending_tokens": [draw.randint(0, 9) for _ in range(max_depth + 2)],
            "pending_counts": draw.randint(1, max_depth + 2),
        }
        if row % 3 == 2:
            rubbish = {k: [RUBBISH] * len(v) if isinstance(v, list) else RUBBISH for k, v in values.items()}
            values = rubbish | {"kv_lengths": length + limit, "limits": limit}
        for name, value in values.items():
            columns[name].append(value)
    widths = {"kv_block_ids": (MAX_BLOCKS,), "granted_block_ids": (MAX_BLOCKS,), "pending_tokens": (max_depth + 2,)}  # fmt: skip
    return RowState(
        **{
            name: torch.tensor(column, dtype=torch.int64, device=device).view(num_rows, *widths.get(name, ()))
            for name, column in columns.items()
        }
    )


def copied(rows: RowState) -> RowState:
    return RowState(**{field.name: getattr(rows, field.name).clone() for field in fields(RowState)})


def listed(rows: RowState) -> list[dict[str, object]]:
    """Returns one dictionary for each row."""
    columns = {field.name: getattr(rows, field.name).tolist() for field in fields(RowState)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
