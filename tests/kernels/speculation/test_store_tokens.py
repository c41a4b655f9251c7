"""store_tokens writes the slots it is given and no other cell."""

import pytest
import torch

from headway.kernels import store_tokens

RUBBISH = -77


@pytest.mark.parametrize(
    "slots",
    [[], [-1], [0], [23], [3, 4], [9, -1, 0, -1, 22], [-1, -1, -1], list(range(23, -1, -1))],
    ids=["none", "padding only", "first", "last", "block boundary", "mixed", "all padding", "all"],
)
def test_only_the_named_slots_change(slots: list[int], device: torch.device) -> None:
    cache = torch.full((6, 4), RUBBISH, dtype=torch.int32, device=device)
    tokens = torch.arange(len(slots), device=device) + 151_000
    store_tokens(tokens, torch.tensor(slots, device=device).long(), cache)
    expected = [RUBBISH] * 24
    for place, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = 151_000 + place
    assert cache.flatten().tolist() == expected


def test_many_tokens_over_several_programs(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(4096, generator=generator)[:1000].to(device)
    cache = torch.full((256, 16), RUBBISH, dtype=torch.int32, device=device)
    store_tokens(torch.arange(1000, device=device), slots, cache)
    assert cache.flatten()[slots].tolist() == list(range(1000))
    assert int((cache == RUBBISH).sum()) == 3096
