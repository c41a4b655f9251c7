"""verify_and_rewind against the separate functions, and against a row-by-row statement of what it
promises."""

import pytest
import torch
from headway_testing.round_rows import copied, listed, random_rows

from headway.kernels import RowState, prepare_verify_inputs, verify_and_rewind

RUBBISH = -77


def committed(
    before: dict[str, object],
    state: dict[str, object],
    tokens: list[int],
    sampled: list[int],
    block_size: int,
) -> int:
    """Moves the dictionary of one row on; returns how many tokens stay. `before`: the row ahead of
    prepare_verify_inputs."""
    if state["prefill_status"] == 1:
        return 0
    depth, accepted = len(sampled) - 1, 0
    while accepted < depth and tokens[accepted + 1] == sampled[accepted]:
        accepted += 1
    length = before["kv_lengths"] + accepted + 1
    blocks = -(-length // block_size)
    table = [g if i < blocks else -1 for i, g in enumerate(state["granted_block_ids"])]
    state |= {
        "last_tokens": sampled[accepted],
        "kv_lengths": length,
        "last_block_offsets": (length - 1) % block_size,
        "block_counts": blocks,
        "last_block_ids": table[blocks - 1],
        "kv_block_ids": table,
    }
    pending = state["pending_tokens"]
    first = min(state["pending_counts"], len(pending) - 1) if depth == 0 else 0
    state["pending_tokens"] = [*pending[:first], *sampled, *pending[first + depth + 1 :]]
    state["pending_counts"] = first + accepted + 1
    return accepted + 1


def agreeing(rows: RowState, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts and sampled tokens that agree more often than not, the same ones each time: planted faults must
    not depend on luck."""
    shape, device = (len(rows.limits), depth + 1), rows.limits.device
    generator = torch.Generator().manual_seed(depth)
    sampled = torch.randint(0, 3, shape, generator=generator)
    slips = torch.rand((shape[0], depth), generator=generator) < 0.3
    return torch.where(slips, 7, sampled[:, :-1]).to(device), sampled.to(device)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 40, 70])
@pytest.mark.parametrize(("depth", "block_size"), [(0, 1), (0, 16), (1, 2), (3, 4), (3, 16), (7, 16)])
def test_every_row_keeps_what_the_target_agrees_with(
    num_rows: int, depth: int, block_size: int, device: torch.device
) -> None:
    rows = random_rows(num_rows, block_size, depth, num_rows + depth, device)
    drafts, sampled = agreeing(rows, depth)
    before = listed(rows)
    window = prepare_verify_inputs(rows, drafts, block_size)
    expected = listed(rows)
    emitted = verify_and_rewind(rows, window, sampled, block_size)
    assert emitted.dtype == torch.int64
    tokens = torch.where(window.is_valid, window.token_ids, -1).tolist()
    for row, state in enumerate(expected):
        stays = committed(before[row], state, tokens[row], sampled[row].tolist(), block_size)
        assert emitted[row].tolist() == [stays, *sampled[row].tolist()]
    assert listed(rows) == expected


@pytest.mark.parametrize("agrees", [True, False], ids=["all accepted", "none accepted"])
def test_every_offset_in_a_block(agrees: bool, device: torch.device) -> None:
    depth, block_size = 3, 8
    rows = random_rows(block_size, block_size, depth, 0, device)
    rows.kv_lengths.copy_(torch.arange(block_size) + block_size)
    rows.limits.fill_(6 * block_size)
    rows.depth_caps.fill_(depth)
    rows.granted_block_ids.copy_(torch.arange(6 * block_size).view(block_size, 6) + 1)
    rows.block_counts.copy_((rows.kv_lengths + block_size - 1) // block_size)
    rows.last_block_offsets.copy_((rows.kv_lengths - 1) % block_size)
    in_use = torch.arange(6, device=device) < rows.block_counts[:, None]
    rows.kv_block_ids.copy_(torch.where(in_use, rows.granted_block_ids, -1))
    sampled = torch.arange(4, device=device).repeat(block_size, 1)
    window = prepare_verify_inputs(rows, sampled[:, :-1] + (not agrees), block_size)
    stays = verify_and_rewind(rows, window, sampled, block_size)[:, 0]
    assert stays.tolist() == [4 if agrees else 1] * block_size
    lengths = torch.arange(block_size) + block_size + stays.cpu()
    assert rows.kv_lengths.tolist() == lengths.tolist()
    assert rows.block_counts.tolist() == (-(-lengths // block_size)).tolist()


@pytest.mark.parametrize("depth", [0, 3])
def test_the_host_gets_no_broken_token_and_the_rows_go_on_with_it(depth: int, device: torch.device) -> None:
    rows = random_rows(40, 16, depth, depth, device)
    drafts, sampled = agreeing(rows, depth)
    window = prepare_verify_inputs(rows, drafts, 16)
    again = copied(rows)
    broken = torch.rand(sampled.shape, device=device) < 0.3
    emitted = verify_and_rewind(rows, window, sampled, 16, broken=broken)
    whole = verify_and_rewind(again, window, sampled, 16)
    assert listed(rows) == listed(again)
    assert torch.equal(emitted[:, 0], whole[:, 0])
    assert torch.equal(emitted[:, 1:], torch.where(broken, -1, sampled))


def test_a_given_buffer_is_filled_and_returned(device: torch.device) -> None:
    rows = random_rows(7, 16, 3, 3, device)
    drafts, sampled = agreeing(rows, 3)
    window = prepare_verify_inputs(rows, drafts, 16)
    again = copied(rows)
    out = torch.full((7, 5), RUBBISH, device=device)
    assert verify_and_rewind(rows, window, sampled, 16, out=out) is out
    assert torch.equal(out, verify_and_rewind(again, window, sampled, 16))
