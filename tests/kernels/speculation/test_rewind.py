"""rewind_kv_cache against a row-by-row statement of what it promises."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from headway.kernels import rewind_kv_cache

RUBBISH = -123_456
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@dataclass
class Rows:
    """Bookkeeping of rows as lists; the blocks of row r are 1000 * r + 1, + 2, ..."""

    accepted: list[int] = field(default_factory=list)
    prefill: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    last_id: list[int] = field(default_factory=list)
    table: list[list[int]] = field(default_factory=list)

    def add(self, length: int, accepted: int, prefill: int, block_size: int, max_blocks: int) -> None:
        row, blocks = len(self.length), -(-length // block_size)
        self.accepted.append(accepted)
        self.prefill.append(prefill)
        self.offset.append((length - 1) % block_size)
        self.length.append(length)
        self.count.append(blocks)
        self.table.append([1000 * row + i + 1 if i < blocks else -1 for i in range(max_blocks)])
        self.last_id.append(self.table[-1][blocks - 1] if blocks <= max_blocks else -1)

    def add_rubbish(self, rows: int, max_blocks: int) -> None:
        for column in (self.accepted, self.prefill, self.offset, self.length, self.count, self.last_id):
            column += [RUBBISH] * rows
        self.table += [[RUBBISH] * max_blocks for _ in range(rows)]

    def state(self) -> tuple[list[int], list[int], list[int], list[int], list[list[int]]]:
        return self.offset, self.length, self.count, self.last_id, self.table


def rewound(rows: Rows, depth: int, block_size: int, active: int) -> tuple[list[int], list[bool]]:
    """The promise, one row after the other; changes `rows`."""
    released, removed = [0] * len(rows.length), [False] * len(rows.length)
    for row in range(active):
        back = 0 if rows.prefill[row] else depth - rows.accepted[row]
        released[row] = rows.last_id[row]
        rows.length[row] -= back
        place = rows.offset[row] - back
        rows.offset[row] = place % block_size
        if place < 0:
            removed[row] = True
            rows.count[row] -= 1
            if rows.count[row] < len(rows.table[row]):
                rows.table[row][rows.count[row]] = -1
            rows.last_id[row] = rows.table[row][max(rows.count[row] - 1, 0)]
    return released, removed


def check(
    rows: Rows,
    depth: int,
    block_size: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.int64,
    active: int | None = None,
    active_argument: int | torch.Tensor | None = None,
    two_dimensional: bool = False,
    strided: bool = False,
) -> None:
    def vector(values: list[int]) -> torch.Tensor:
        flat = torch.tensor(values, dtype=dtype, device=device)
        return flat[None] if two_dimensional else flat

    vectors = [
        vector(v) for v in (rows.accepted, rows.prefill, rows.offset, rows.length, rows.count, rows.last_id)
    ]
    max_blocks = len(rows.table[0]) if rows.table else 4
    table = torch.tensor(rows.table, dtype=dtype, device=device).view(len(rows.table), max_blocks)
    backing = torch.full((table.shape[0], 2 * max_blocks + 3), 77, dtype=dtype, device=device)
    if strided:
        backing[:, 1 : 2 * max_blocks : 2] = table
        table = backing[:, 1 : 2 * max_blocks : 2]
    released, removed = rewind_kv_cache(*vectors, table, depth, block_size, active_argument)

    expected = rewound(rows, depth, block_size, len(rows.length) if active is None else active)
    assert (released.tolist(), removed.tolist()) == expected
    assert released.dtype == dtype
    assert removed.dtype == torch.bool
    assert (*(v.view(-1).tolist() for v in vectors[2:]), table.tolist()) == rows.state()
    if strided:
        backing[:, 1 : 2 * max_blocks : 2] = 77
        assert bool((backing == 77).all()), "cells beside the table's columns changed"


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_offset_depth_and_acceptance(block_size: int, device: torch.device) -> None:
    for depth in range(block_size):
        rows = Rows()
        for offset, accepted, prefill in itertools.product(range(block_size), range(depth + 1), (0, 1)):
            rows.add(2 * block_size + offset + 1, accepted, prefill, block_size, 5)
        check(rows, depth, block_size, device)


@DTYPES
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["n", "1xn"])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_layouts_and_dtypes(
    dtype: torch.dtype, two_dimensional: bool, strided: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = Rows()
    for length in torch.randint(8, 30, (37,), generator=generator).tolist():
        rows.add(length, length % 4, int(length % 5 == 0), 4, 8)
    check(rows, 3, 4, device, dtype=dtype, two_dimensional=two_dimensional, strided=strided)


def test_no_rows(device: torch.device) -> None:
    check(Rows(), 3, 16, device)


def test_one_row_in_its_first_block(device: torch.device) -> None:
    rows = Rows()
    rows.add(4, 0, 0, 16, 2)
    check(rows, 3, 16, device)


@DTYPES
@pytest.mark.parametrize("kind", ["int", "tensor", "int32 tensor"])
@pytest.mark.parametrize("active", [0, 1, 5])
def test_rubbish_beyond_the_active_rows_is_neither_changed_nor_of_effect(
    dtype: torch.dtype, kind: str, active: int, device: torch.device
) -> None:
    rows = Rows()
    for row in range(active):
        rows.add(17 + row, row % 4, 0, 4, 8)
    rows.add_rubbish(6, 8)
    argument: int | torch.Tensor = active
    if kind != "int":
        argument = torch.tensor(
            [active], dtype=torch.int32 if kind == "int32 tensor" else torch.int64, device=device
        )
    check(rows, 3, 4, device, dtype=dtype, active=active, active_argument=argument)


def test_a_window_that_reached_past_the_table_comes_back(device: torch.device) -> None:
    rows = Rows()
    rows.add(9, 0, 0, 4, 2)
    check(rows, 3, 4, device, strided=True)


def test_given_buffers_are_filled_and_returned(device: torch.device) -> None:
    released = torch.full((2,), RUBBISH, device=device)
    removed = torch.ones(2, dtype=torch.bool, device=device)
    vector = torch.tensor([1, 1], device=device)
    result = rewind_kv_cache(
        vector.clone(),
        torch.tensor([0, 1], device=device),
        vector.clone(),
        vector + 4,
        vector + 1,
        torch.tensor([8, 9], device=device),
        torch.tensor([[7, 8], [6, 9]], device=device),
        3,
        4,
        out=(released, removed),
    )
    assert result[0] is released
    assert result[1] is removed
    assert (released.tolist(), removed.tolist()) == ([8, 9], [True, False])


def test_a_window_over_two_boundaries_is_refused(device: torch.device) -> None:
    vector = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="4 speculative tokens would cross more than one boundary"):
        rewind_kv_cache(vector, vector, vector, vector, vector, vector, vector[None], 4, 4)
