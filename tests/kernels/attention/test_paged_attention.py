"""paged_attention against softmax over the visible keys, and that a query's result is its own."""

import pytest
import torch

from headway.kernels import ScoreRule, paged_attention
from headway.kernels.reference.attention.paged_attention import paged_attention as paged_attention_twin

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16
GUARD = 1e4


class Case:
    """Rows with shuffled blocks; unused entries are -1 and unused cells hold GUARD."""

    def __init__(
        self,
        starts: list[int],
        window: int,
        device: torch.device,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        max_blocks: int = 40,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(starts) + window)
        rows, (q_heads, kv_heads) = len(starts), heads
        self.scale = head_dim**-0.5
        self.starts = torch.tensor(starts, device=device, dtype=torch.int64)
        counts = [-(-(s + window) // BLOCK_SIZE) for s in starts]
        ids = (torch.randperm(sum(counts) + 2, generator=generator)).tolist()
        self.table = torch.full((rows, max_blocks), -1, dtype=torch.int32)
        shape = (sum(counts) + 2, BLOCK_SIZE, kv_heads, head_dim)
        self.keys, self.values = torch.full((2, *shape), GUARD, dtype=dtype)
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            own = torch.tensor(ids[:count])
            ids = ids[count:]
            self.table[row, :count] = own.int()
            places = torch.arange(start + window)
            index = own[places // BLOCK_SIZE], places % BLOCK_SIZE
            key, value = torch.randn(2, start + window, kv_heads, head_dim, generator=generator).to(dtype)
            self.keys[index], self.values[index] = key, value
            self.dense.append((key.double(), value.double()))
        self.query = torch.randn(rows, window, q_heads, head_dim, generator=generator).to(device, dtype)
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        self.table = self.table.to(device)

    def run(
        self,
        *,
        first_position: int = 0,
        row: slice = slice(None),
        place: slice = slice(None),
        soft_cap: float = 0.0,
        window: int = 0,
    ) -> torch.Tensor:
        start = self.starts[row] + (place.start or 0)
        return paged_attention(
            self.query[row, place].contiguous(),
            self.keys,
            self.values,
            self.table[row],
            start,
            ScoreRule(self.scale, soft_cap, first_position, window),
        )

    def expected(self, first_position: int = 0) -> torch.Tensor:
        result = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, (key, value) in enumerate(self.dense):
            group = self.query.shape[2] // key.shape[1]
            for place in range(self.query.shape[1]):
                end = int(self.starts[row]) + place + 1
                if end <= first_position:
                    continue
                k = key[first_position:end].repeat_interleave(group, 1)
                v = value[first_position:end].repeat_interleave(group, 1)
                scores = torch.einsum("hd,nhd->hn", self.query[row, place].double().cpu(), k) * self.scale
                result[row, place] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
        return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("starts", "window"),
    [([0], 1), ([15], 1), ([16], 1), ([0, 1, 40, 300], 4), ([13, 14, 15, 16], 5), ([0], 70), ([100], 33)],
)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((3, 3), 16), ((7, 1), 128)])
def test_softmax_over_the_visible_keys(
    starts: list[int],
    window: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = Case(starts, window, device, heads=heads, head_dim=head_dim, dtype=dtype)
    result = case.run()
    assert result.dtype == dtype
    torch.testing.assert_close(result.double().cpu(), case.expected(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_query_of_a_cpu_has_its_bits_in_any_window(head_dim: int, group: int, soft_cap: float) -> None:
    """Products of few rows take other paths, which depend on the processor and on head_dim."""
    generator = torch.Generator().manual_seed(head_dim + group)
    keys, values = torch.randn(2, 40, 16, 2, head_dim, generator=generator)
    query = torch.randn(1, 40, 2 * group, head_dim, generator=generator)
    rule, table = ScoreRule(head_dim**-0.5, soft_cap=soft_cap), torch.arange(40)[None]
    for start in (1, 500):
        starts = torch.tensor([start])
        whole = paged_attention_twin(query, keys, values, table, starts, rule)
        for window in (1, 2, 3, 4, 5, 8, 11, 17):
            part = paged_attention_twin(query[:, :window].contiguous(), keys, values, table, starts, rule)
            assert torch.equal(part, whole[:, :window]), (start, window)


@pytest.mark.parametrize("first_position", [1, 5, 17])
def test_keys_before_the_first_position_are_not_seen(first_position: int, device: torch.device) -> None:
    case = Case([0, 3, 16, 40], 4, device)
    case.keys[case.table[:, 0].long(), :1] = GUARD
    result = case.run(first_position=first_position)
    torch.testing.assert_close(result.double().cpu(), case.expected(first_position), rtol=0, atol=2e-6)


def test_a_query_without_keys_gets_zeros(device: torch.device) -> None:
    result = Case([0, 8], 3, device).run(first_position=2)
    assert bool((result[0, :2] == 0).all())
    assert bool((result[0, 2] != 0).any())


def test_a_window_may_reach_past_its_blocks(device: torch.device) -> None:
    """The queries there are never used; the others must be right."""
    case = Case([28], 6, device, max_blocks=3)
    expected = case.run()[:, :4]
    case.table = case.table[:, :2]
    result = case.run()
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result[:, :4], expected, rtol=0, atol=1e-6)


def test_a_given_buffer_is_filled_and_returned(device: torch.device) -> None:
    case = Case([5, 20], 2, device)
    buffer = torch.full_like(case.query, torch.nan)
    result = paged_attention(
        case.query, case.keys, case.values, case.table, case.starts, ScoreRule(case.scale), out=buffer
    )
    assert result is buffer
    assert torch.equal(buffer, case.run())


def test_no_rows(device: torch.device) -> None:
    assert Case([], 3, device).run().shape == (0, 3, 4, 64)


@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 0), (0.0, 17), (0.0, 600), (2.0, 0), (2.0, 600)])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (8, 1), (3, 1)], ids=str)
def test_a_query_gets_the_same_alone_and_in_any_window_or_batch(
    heads: tuple[int, int], soft_cap: float, window: int, device: torch.device
) -> None:
    """Contexts around every size at which sums over keys are cut."""
    places = 64
    case = Case(
        [0, 150, 170, 225, 300, 372, 480, 540, 1090], places, device, heads=heads, head_dim=32, max_blocks=80
    )
    together = case.run(soft_cap=soft_cap, window=window)
    for row in range(9):
        for width, place in ((1, 0), (1, 41), (2, 13), (4, 22), (4, 60), (5, 43), (33, 7), (64, 0)):
            alone = case.run(
                row=slice(row, row + 1), place=slice(place, place + width), soft_cap=soft_cap, window=window
            )
            difference = (alone[0] - together[row, place : place + width]).abs().max()
            assert float(difference) <= (0 if device.type == "cpu" else TOLERANCE[torch.float32]), (
                row,
                width,
                place,
            )


@pytest.mark.parametrize("length", [5, 47, 150, 300, 383])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_does_not_matter_where_the_blocks_are(length: int, dtype: torch.dtype) -> None:
    """One behind the other, at the cache's end too, where what is read behind them would leave it, or
    anywhere."""
    generator = torch.Generator().manual_seed(length)
    num_blocks, size = 64, 16
    own = -(-(length + 4) // size)
    rows = torch.randn(2, own * size, 2, 64, generator=generator, dtype=dtype)
    query = torch.randn(1, 4, 4, 64, generator=generator, dtype=dtype)
    starts = torch.tensor([length])
    results = []
    for ids in (
        torch.arange(own),
        torch.arange(num_blocks - own, num_blocks),
        torch.randperm(num_blocks, generator=generator)[:own],
    ):
        keys, values = torch.randn(2, num_blocks, size, 2, 64, generator=generator, dtype=dtype)
        keys[ids], values[ids] = (side.view(own, size, 2, 64) for side in rows)
        table = torch.full((1, 40), -1)
        table[0, :own] = ids
        results.append(paged_attention(query, keys, values, table, starts, ScoreRule(0.125)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
