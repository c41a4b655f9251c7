"""advance_draft_step against a request-by-request statement of what it promises."""

import random

import torch
from headway_testing.random_batches import BATCHES

from headway.kernels import advance_draft_step

RUBBISH = -123_456


def advanced(
    position: int, table: list[int], length: int, block_size: int, max_model_len: int
) -> tuple[int, int, int]:
    """New position, slot and length."""
    if position + 1 >= max_model_len:
        return 0, -1, 1
    column, offset = divmod(position + 1, block_size)
    block = table[min(column, len(table) - 1)]
    return position + 1, block * block_size + offset, min(length + 1, max_model_len)


@BATCHES
def test_random_batches(batches: int, device: torch.device) -> None:
    draw = random.Random(batches)
    for _ in range(batches):
        requests, padding, behind = draw.choice([0, 1, 7, 40, 200]), draw.choice([0, 3, 60]), 2
        block_size, max_blocks = draw.choice([1, 4, 16]), draw.randint(1, 6)
        # Positions behind the table, too, and some at the context's end.
        limit = max(block_size * (max_blocks + draw.choice([-1, 0, 1])), 1)
        tables = [draw.sample(range(2**28, 2**28 + 99), max_blocks) for _ in range(requests)]
        positions = [draw.choice([draw.randrange(limit), limit - 1, limit - 2]) for _ in range(requests)]
        positions = [max(position, 0) for position in positions]
        lengths = [draw.choice([position + 1, limit]) for position in positions]
        dtype = draw.choice([torch.int32, torch.int64])
        given = torch.tensor(positions, dtype=dtype, device=device)
        table = torch.tensor(tables, dtype=dtype, device=device).view(requests, max_blocks)
        if draw.random() < 0.5:
            table = torch.cat([table, table * 0], 1)[:, :max_blocks]
        seq_lens = torch.tensor(lengths, dtype=dtype, device=device)
        new_positions = torch.full((requests + behind,), RUBBISH, dtype=dtype, device=device)
        if draw.random() < 0.5:
            given = new_positions[:requests].copy_(given)
        slots = torch.full((requests + padding + behind,), RUBBISH, device=device)
        size = requests + padding if padding or draw.random() < 0.5 else None
        advance_draft_step(given, table, seq_lens, block_size, limit, new_positions, slots, size)

        rows = zip(positions, tables, lengths, strict=True)
        columns = list(zip(*(advanced(*row, block_size, limit) for row in rows), strict=True)) or [()] * 3
        rubbish = [RUBBISH] * behind
        assert new_positions.tolist() == [*columns[0], *rubbish]
        assert slots.tolist() == [*columns[1], *[-1] * padding, *rubbish]
        assert seq_lens.tolist() == list(columns[2])


def test_a_block_boundary_and_the_end_of_the_context(device: torch.device) -> None:
    positions = torch.tensor([2, 3, 7, 9], device=device)
    table = torch.tensor([[5, 6], [9, 8], [1, 2], [3, 4]], device=device)
    lengths, slots = torch.tensor([3, 4, 8, 8], device=device), torch.full((4,), RUBBISH, device=device)
    advance_draft_step(positions, table, lengths, 4, 8, positions, slots)
    assert positions.tolist() == [3, 4, 0, 0]
    assert slots.tolist() == [23, 32, -1, -1]
    assert lengths.tolist() == [4, 5, 1, 1]
