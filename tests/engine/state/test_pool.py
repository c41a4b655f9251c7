"""State by row in the pool: its shape, its bytes, and that blocks and rows do not touch each other."""

from __future__ import annotations

import torch

from headway.engine.state.pool import StatePool
from headway.engine.state.specs import PagedSpec, RowSpec, block_bytes, row_bytes, scratch_bytes

SUM = RowSpec("sum", (4,), torch.float64)
KEYS = PagedSpec("keys", (1, 8), torch.float32)
LAYERS = [(KEYS, SUM), (SUM,)]


def new_pool() -> StatePool:
    return StatePool(LAYERS, num_blocks=5, num_rows=3, block_size=16, device=torch.device("cpu"))


def test_row_state_has_one_entry_a_row_and_no_bytes_of_a_block() -> None:
    pool = new_pool()
    shapes = [{name: tuple(tensor.shape) for name, tensor in pool.layer(i).items()} for i in range(2)]
    assert shapes == [{"keys": (5, 16, 1, 8), "sum": (5, 4)}, {"sum": (5, 4)}]
    assert (block_bytes(LAYERS, 16), row_bytes(LAYERS)) == (16 * 8 * 4, 2 * 4 * 8)
    assert pool.layer(0)["sum"].data_ptr() != pool.layer(1)["sum"].data_ptr()


def test_a_kind_of_layer_has_the_state_of_all_its_layers_in_one_tensor() -> None:
    keys, sums = PagedSpec("keys", (2,), torch.float32), RowSpec("sum", (3,), torch.float32)
    pool = StatePool(
        [(sums,), (keys,), (sums,), (keys,)],
        num_blocks=2,
        num_rows=1,
        block_size=4,
        device=torch.device("cpu"),
    )
    (first, of_sums), (second, of_keys) = pool.kinds()
    assert (first, of_sums.keys(), second, of_keys.keys()) == (0, {"sum"}, 1, {"keys"})
    of_sums["sum"][1, 0] = 5
    assert pool.layer(2)["sum"][0].tolist() == [5.0] * 3
    assert not pool.layer(0)["sum"].any()


def test_a_pool_that_is_tried_has_the_blocks_of_all_layers_in_the_memory_of_one() -> None:
    pool, tried = (
        StatePool(
            [(KEYS, SUM)] * 3,
            num_blocks=5,
            num_rows=3,
            block_size=16,
            device=torch.device("cpu"),
            is_tried=is_tried,
        )
        for is_tried in (False, True)
    )
    for name, num_places in (("keys", 1), ("sum", 3)):
        layers = [tried.layer(index)[name] for index in range(3)]
        wanted = pool.layer(0)[name]
        assert {(t.shape, t.stride()) for t in layers} == {(wanted.shape, wanted.stride())}
        assert len({tensor.data_ptr() for tensor in layers}) == num_places
        assert len({pool.layer(index)[name].data_ptr() for index in range(3)}) == 3


def test_wiping_blocks_leaves_the_state_of_rows() -> None:
    pool = new_pool()
    for index in range(2):
        for tensor in pool.layer(index).values():
            tensor.fill_(1)
    pool.wipe(torch.arange(5))
    assert not pool.layer(0)["keys"].any()
    assert all(pool.layer(index)["sum"].all() for index in range(2))


def test_checkpoints_give_back_the_state_that_they_were_made_of() -> None:
    pool = StatePool(
        LAYERS, num_blocks=5, num_rows=3, num_checkpoints=2, block_size=16, device=torch.device("cpu")
    )
    sums = [pool.layer(index)["sum"] for index in range(2)]
    for number, tensor in enumerate(sums):
        tensor[:3] = torch.arange(12).view(3, 4) + 100 * number + 1
    before = [tensor.clone() for tensor in sums]
    pool.save_rows(torch.tensor([2, 0]), torch.tensor([1, 0]))
    pool.start_rows(torch.tensor([0, 1, 2]), torch.tensor([1, -1, 0]))
    for tensor, old in zip(sums, before, strict=True):
        assert torch.equal(tensor[:3], torch.stack([old[2], torch.zeros(4, dtype=torch.float64), old[0]]))


def test_scratch_of_rows_is_neither_zeroed_nor_copied_nor_part_of_a_checkpoint() -> None:
    scratch = RowSpec("scratch", (2,), torch.float32, is_scratch=True)
    pool = StatePool(
        [(SUM,)],
        (scratch,),
        num_blocks=5,
        num_rows=3,
        num_checkpoints=2,
        block_size=16,
        device=torch.device("cpu"),
    )
    kept = pool.drafter["scratch"]
    before = kept.copy_(torch.arange(6).view(3, 2)).clone()
    pool.save_rows(torch.tensor([2, 0]), torch.tensor([1, 0]))
    pool.start_rows(torch.tensor([0, 1, 2]), torch.tensor([1, -1, 0]))
    assert torch.equal(kept, before)
    assert (row_bytes([(SUM, scratch)]), scratch_bytes([(SUM, scratch)])) == (4 * 8, 2 * 4)
    assert not StatePool(
        (), (scratch,), num_blocks=1, num_rows=1, block_size=16, device=kept.device
    ).has_row_state
