"""Rows of the device: set up from a request, moved and released column by column."""

from __future__ import annotations

import torch

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.plan import RowSetup
from headway.engine.state.row_tensors import RowTensors, numbers_of

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=(1 << 64) - 3)
# What a request's row holds, beside what kernels write.
TAKEN = {
    "kv_lengths": 40, "limits": 40, "depth_caps": 2, "temperatures": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125,
    "seeds": -3, "joins_ngrams": 1,
}  # fmt: skip
PADDING = {"kv_lengths": 0, "limits": 0, "kv_block_ids": -1, "granted_block_ids": -1}


def rows(num_rows: int) -> RowTensors:
    return RowTensors.allocate(num_rows, max_blocks=3, max_pending=3, device=CPU)


def test_a_row_that_is_set_up_has_the_numbers_of_its_request_and_no_other_row_changes() -> None:
    table = rows(3)
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}
    integers, floats = numbers_of(RowSetup(9, 1, SAMPLING, limit=40, depth_cap=2))
    table.set_up(integers[None], floats[None])
    for name, tensor in table.tensors().items():
        assert torch.equal(tensor[[0, 2]], before[name][[0, 2]]), name
        if name in TAKEN:
            assert tensor[1].item() == TAKEN[name], name
        else:
            assert torch.equal(tensor[1], before[name][1]), name


def test_a_moved_row_takes_all_columns_along_and_its_old_place_becomes_padding() -> None:
    table = rows(4)
    for count, tensor in enumerate(table.tensors().values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * count)
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}
    table.move(torch.tensor([3]), torch.tensor([0]))
    for name, tensor in table.tensors().items():
        assert torch.equal(tensor[:3], before[name][[3, 1, 2]]), name
        if name == "state_ids":
            assert tensor[3] == before[name][0]  # exchanged, so that no two rows share an id
            continue
        expected = torch.full_like(tensor[3], PADDING[name]) if name in PADDING else before[name][3]
        assert torch.equal(tensor[3], expected), name


def test_first_rows_share_their_memory_and_kernels_get_them_by_name() -> None:
    table = rows(4)
    some = table.first(2)
    some.kv_lengths.fill_(5)
    assert table.kv_lengths.tolist() == [5, 5, 0, 0]
    assert some.state().kv_lengths.data_ptr() == table.kv_lengths.data_ptr()
    assert table.pending_tokens.shape == (4, 3)


def test_state_ids_stay_a_permutation_and_lead_to_the_same_state_after_any_moves() -> None:
    table, state = rows(6), torch.arange(6) * 10
    owners = {row: int(state[table.state_ids[row]]) for row in range(6)}
    for source, target in ((5, 0), (4, 5), (3, 4), (0, 3)):
        table.move(torch.tensor([source]), torch.tensor([target]))
        assert int(state[table.state_ids[target]]) == owners[source]
        owners[source], owners[target] = owners[target], owners[source]
        assert sorted(table.state_ids.tolist()) == list(range(6))
