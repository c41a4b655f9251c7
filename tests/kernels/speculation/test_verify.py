"""verify_speculative_tokens against a row-by-row statement of what it promises."""

import itertools

import pytest
import torch

from headway.kernels import verify_speculative_tokens


def verified(
    tokens: list[int], chosen: list[int], decode: int, prefill: int, depth: int
) -> tuple[list[int], list[bool]]:
    last, mask = [], []
    for row in range(decode):
        first = row * (depth + 1)
        accepted = 0
        while accepted < depth and tokens[first + accepted + 1] == chosen[first + accepted]:
            accepted += 1
        last.append(first + accepted)
        mask += [True] * (accepted + 1) + [False] * (depth - accepted)
    for row in range(prefill):
        last.append(decode * (depth + 1) + row)
        mask.append(True)
    return last, mask


def check(
    tokens: list[int],
    chosen: list[int],
    decode: int,
    prefill: int,
    depth: int,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
    *,
    two_dimensional: bool = False,
) -> None:
    given = torch.tensor(tokens, dtype=dtype, device=device)
    target = torch.tensor(chosen, dtype=dtype, device=device)
    if two_dimensional:
        given, target = given[None], target[None]
    last, mask, flat = verify_speculative_tokens(given, target, decode, prefill, depth)
    total = decode * (depth + 1) + prefill
    expected_last, expected_mask = verified(tokens, chosen, decode, prefill, depth)
    assert last.tolist() == expected_last
    assert last.dtype == torch.int64
    assert mask.tolist() == expected_mask + [False] * (len(tokens) - total)
    assert mask.dtype == torch.bool
    assert flat.shape == (len(tokens),)
    assert flat.tolist() == tokens


def test_the_worked_example(device: torch.device) -> None:
    tokens = [10, 11, 99, 20, 21, 22, 30, 98, 97, 40, 50]
    chosen = [11, 12, 13, 21, 22, 23, 31, 32, 33, 41, 51]
    last, mask, _ = verify_speculative_tokens(
        torch.tensor(tokens, device=device), torch.tensor(chosen, device=device), 3, 2, 2
    )
    assert mask.tolist() == [True, True, False, True, True, True, True, False, False, True, True]
    assert last.tolist() == [1, 5, 6, 9, 10]


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (1, 0), (0, 3), (40, 0), (33, 5)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["n", "1xn"])
def test_random_batches(
    depth: int, decode: int, prefill: int, dtype: torch.dtype, two_dimensional: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(depth)
    total = decode * (depth + 1) + prefill
    tokens, chosen = torch.randint(0, 2, (2, total), generator=generator).tolist()
    check(tokens, chosen, decode, prefill, depth, device, dtype, two_dimensional=two_dimensional)


def test_every_pattern_of_agreement_at_depth_4(device: torch.device) -> None:
    tokens, chosen = [], []
    for pattern in itertools.product((True, False), repeat=4):
        tokens += [1, 2, 3, 4, 5]
        chosen += [t if agrees else 0 for t, agrees in zip((2, 3, 4, 5), pattern, strict=True)] + [6]
    check(tokens, chosen, 16, 0, 4, device)


def test_a_row_does_not_look_into_the_next_one(device: torch.device) -> None:
    check([1, 2, 9, 3], [7, 9, 3, 4], 2, 0, 1, device)


def test_entries_of_minus_one_are_never_accepted(device: torch.device) -> None:
    check([5, -1, -1, 6, 7, -1], [3, 4, 5, 7, 8, 9], 2, 0, 2, device)


def test_tokens_beyond_the_rows_have_no_effect(device: torch.device) -> None:
    check([1, 2, 8, 8, 8], [2, 3, 8, 8, 8], 1, 0, 1, device)


def test_given_buffers_are_filled_and_returned(device: torch.device) -> None:
    last = torch.full((2,), -5, device=device)
    mask = torch.ones(4, dtype=torch.bool, device=device)
    tokens = torch.tensor([1, 2, 3, 4], device=device)
    result = verify_speculative_tokens(
        tokens, torch.tensor([2, 0, 0, 0], device=device), 2, 0, 1, out=(last, mask)
    )
    assert result[0] is last
    assert result[1] is mask
    assert (last.tolist(), mask.tolist()) == ([1, 2], [True, True, True, False])
