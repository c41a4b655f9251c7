"""expand_drafter_inputs against a request-by-request statement of what it promises."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from headway_testing.random_batches import BATCHES

from headway.kernels import expand_drafter_inputs

PADDING, PARALLEL = 999, 777


@dataclass(frozen=True, slots=True)
class Request:
    tokens: list[int]  # with the rejected ones
    rejected: int
    first_position: int
    bonus: int


def expanded(requests: list[Request], num_slots: int, shift: bool) -> tuple[list[int], ...]:
    """token_ids, positions, is_rejected, is_masked, new_token_indices, hidden_state_mapping."""
    columns: list[list[int]] = [[], [], [], []]
    new, mapping = [], []
    for request in requests:
        begin = len(columns[0])
        mapping += [begin + rank for rank in range(len(request.tokens))]
        kept = request.tokens[: len(request.tokens) - request.rejected][shift:]
        new += [begin + len(kept) + i for i in range(num_slots)]
        places = [(token, False, False) for token in [*kept, request.bonus]]
        places += [(PARALLEL, False, True)] * (num_slots - 1) + [(PADDING, True, False)] * request.rejected
        for rank, (token, is_rejected, is_masked) in enumerate(places):
            position = 0 if is_rejected else request.first_position + rank
            for column, value in zip(columns, (token, position, is_rejected, is_masked), strict=True):
                column.append(value)
    return (*columns, new, mapping)


def check(
    requests: list[Request], num_slots: int, shift: bool, dtypes: list[torch.dtype], device: torch.device
) -> None:
    def vector(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    ids, place, index = dtypes
    sizes = [len(request.tokens) for request in requests]
    starts = [0, *itertools.accumulate(sizes)]
    found = expand_drafter_inputs(
        vector([token for request in requests for token in request.tokens], ids),
        vector([r.first_position + i for r in requests for i in range(len(r.tokens))], place),
        vector([request.bonus for request in requests], ids),
        vector(starts, index),
        vector([end - 1 - r.rejected for end, r in zip(starts[1:], requests, strict=True)], index),
        padding_token_id=PADDING,
        parallel_token_id=PARALLEL,
        num_padding_slots=num_slots,
        shift=shift,
    )
    expected = expanded(requests, num_slots, shift)
    assert tuple(t.tolist() for t in found[:5] if t is not None) == expected[:5]
    assert [t.dtype for t in found[:5] if t is not None] == [ids, place, torch.bool, torch.bool, index]
    if not shift:
        assert found[5] is None
        return
    assert found[5] is not None
    assert (found[5].tolist(), found[5].dtype) == (expected[5], index)


def random_request(draw: random.Random, longest: int) -> Request:
    size = draw.choice([1, draw.randint(1, 9), draw.randint(1, longest)])
    rejected = draw.choice([0, size - 1, draw.randint(0, size - 1)])
    tokens = [draw.randrange(500) for _ in range(size)]
    return Request(tokens, rejected, draw.choice([0, draw.randrange(10**6)]), draw.randrange(500))


@BATCHES
def test_random_batches(batches: int, device: torch.device) -> None:
    draw = random.Random(batches)
    for _ in range(batches):
        requests, longest = draw.choice([(0, 1), (1, 700), (3, 300), (7, 40), (30, 8)])
        check(
            [random_request(draw, longest) for _ in range(requests)],
            num_slots=draw.randint(1, 8),
            shift=draw.random() < 0.5,
            dtypes=draw.choices([torch.int32, torch.int64], k=3),
            device=device,
        )


@pytest.mark.parametrize("shift", [False, True], ids=["in place", "shifted"])
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_every_number_of_slots(num_slots: int, shift: bool, device: torch.device) -> None:
    """One token alone, all but one rejected, and none rejected; one request ends where a program does."""
    requests = [Request([4], 0, 9, 1), Request([5, 6, 7], 2, 0, 2), Request(list(range(256)), 0, 3, 3)]
    check(requests, num_slots, shift, [torch.int64] * 3, device)


def test_the_worked_example(device: torch.device) -> None:
    a, b, c, s, m, p = 1, 2, 3, 4, PARALLEL, PADDING
    given = ([a, b, c], [5, 6, 7], [s], [0, 3], [1])
    sizes = {"padding_token_id": p, "parallel_token_id": m, "num_padding_slots": 3}
    tensors = [torch.tensor(values, device=device) for values in given]
    found = [t.tolist() for t in expand_drafter_inputs(*tensors, **sizes, shift=True) if t is not None]
    assert found == [[b, s, m, m, p], [5, 6, 7, 8, 0], [0, 0, 0, 0, 1], [0, 0, 1, 1, 0], [1, 2, 3], [0, 1, 2]]
    found = [t.tolist() for t in expand_drafter_inputs(*tensors, **sizes, shift=False) if t is not None]
    assert found[:2] == [[a, b, s, m, m, p], [5, 6, 7, 8, 9, 0]]
    assert found[2:] == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0], [2, 3, 4]]


@pytest.mark.parametrize("shift", [False, True], ids=["in place", "shifted"])
def test_tokens_behind_the_last_request_count_as_rejected(shift: bool, device: torch.device) -> None:
    given = ([1, 2, 3, 0, 0], [5, 6, 9, 0, 0], [4, 8], [0, 2, 3], [1, 2])
    tokens, positions, is_rejected, _, new, mapping = expand_drafter_inputs(
        *(torch.tensor(values, device=device) for values in given),
        padding_token_id=PADDING,
        parallel_token_id=PARALLEL,
        num_padding_slots=1,
        shift=shift,
    )
    assert tokens.tolist()[-2:] == [PADDING, PADDING]
    assert positions.tolist()[-2:] == [0, 0]
    assert is_rejected.nonzero().flatten().tolist() == [len(tokens) - 2, len(tokens) - 1]
    assert new.tolist() == ([1, 2] if shift else [2, 4])
    assert mapping is None or mapping.tolist() == [0, 1, 2, 3, 4]


def test_no_place_for_the_bonus_token_is_refused(device: torch.device) -> None:
    one = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"num_padding_slots is 0, .* use 1 or more"):
        expand_drafter_inputs(
            one[:1], one[:1], one[:1], one, one[:1],
            padding_token_id=0, parallel_token_id=0, num_padding_slots=0, shift=False,
        )  # fmt: skip
