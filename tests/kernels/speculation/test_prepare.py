"""prepare_next_forward_pass fills exactly the cells it names."""

import pytest
import torch

from headway.kernels import prepare_next_forward_pass, verify_speculative_tokens

DEFAULT = -9


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (1, 0), (0, 2), (35, 0), (17, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["n", "1xn"])
def test_random_batches(
    depth: int, decode: int, prefill: int, dtype: torch.dtype, two_dimensional: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(depth + 1)
    rows, total = decode + prefill, decode * (depth + 1) + prefill
    tokens = torch.randint(0, 2, (total,), generator=generator).to(device, dtype)
    chosen = torch.randint(0, 2, (total,), generator=generator).to(device, dtype)
    places = torch.arange(total, device=device, dtype=dtype) + 100
    last, mask, _ = verify_speculative_tokens(tokens, chosen, decode, prefill, depth)
    sampled = torch.full((rows + 3,), DEFAULT, dtype=dtype, device=device)
    last_places = torch.full((rows + 3,), DEFAULT, dtype=dtype, device=device)
    accepted = torch.full((rows + 3, depth), DEFAULT, dtype=dtype, device=device)
    counts = torch.full((rows + 3,), DEFAULT, dtype=dtype, device=device)
    shape = (1, total) if two_dimensional else (total,)
    prepare_next_forward_pass(
        decode,
        chosen.view(shape),
        places,
        last,
        mask,
        tokens.view(shape),
        sampled,
        last_places,
        accepted,
        counts,
        depth,
    )

    assert sampled.tolist() == [int(chosen[i]) for i in last] + [DEFAULT] * 3
    assert last_places.tolist() == [100 + int(i) for i in last] + [DEFAULT] * 3
    for row in range(rows + 3):
        if row < decode:
            first = row * (depth + 1) + 1
            drafts, kept = tokens[first : first + depth].tolist(), mask[first : first + depth].tolist()
            assert accepted[row].tolist() == [t if k else -1 for t, k in zip(drafts, kept, strict=True)]
            assert int(counts[row]) == sum(kept)
        else:
            assert accepted[row].tolist() == [DEFAULT] * depth
            assert int(counts[row]) == DEFAULT
