"""begin_decode against a row-by-row statement of what it promises."""

import pytest
import torch
from headway_testing.round_rows import listed, random_rows

from headway.kernels import RowState, begin_decode


def widened(rows: RowState, width: int) -> RowState:
    """Tables of that many blocks, the further ones granted, in use as before."""
    num_rows, old = rows.kv_block_ids.shape
    further = torch.arange(width - old, device=rows.limits.device).repeat(num_rows, 1)
    granted = torch.cat([rows.granted_block_ids.abs(), 1000 + further], 1)
    in_use = torch.cat([rows.kv_block_ids, torch.full_like(further, 7)], 1)
    values = {name: getattr(rows, name) for name in RowState.__slots__}
    return RowState(**values | {"granted_block_ids": granted, "kv_block_ids": in_use})


@pytest.mark.parametrize("width", [6, 1024, 1500])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("num_started", [0, 1, 5, 40])
def test_rows_start_behind_their_prompts(
    num_started: int, block_size: int, width: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_started)
    rows = widened(random_rows(40, block_size, 3, 1, device), width)
    index = torch.randperm(40, generator=generator)[:num_started]
    tokens = torch.randint(0, 1000, (num_started,), generator=generator)
    lengths = torch.randint(1, width * block_size + 1, (num_started,), generator=generator)
    lengths[:2] = torch.tensor([block_size, width * block_size])[:num_started]
    expected = listed(rows)
    for row, token, length in zip(index.tolist(), tokens.tolist(), lengths.tolist(), strict=True):
        state, blocks = expected[row], -(-length // block_size)
        granted = state["granted_block_ids"]
        state |= {
            "last_tokens": token,
            "kv_lengths": length,
            "last_block_offsets": (length - 1) % block_size,
            "block_counts": blocks,
            "last_block_ids": granted[blocks - 1],
            "kv_block_ids": granted[:blocks] + [-1] * (width - blocks),
            "pending_tokens": [token, *state["pending_tokens"][1:]],
            "pending_counts": 1,
        }
    begin_decode(rows, index.to(device), tokens.to(device), lengths.to(device), block_size)
    assert listed(rows) == expected
