"""The kernel of paged_attention where contexts reach over tiles and groups, made small for the interpreter."""

import sys

import pytest
import torch

from headway.kernels import paged_attention
from headway.kernels._triton import jit, tl
from headway.kernels.reference.paged_attention import paged_attention as twin

KERNEL = sys.modules["headway.kernels.paged_attention"]
BLOCK_SIZE = 16
TOLERANCE = 3e-6
UNITS = "group", "two-quads", "quad", "tile"


def hand_out(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """All work by the unit: what the others' sums take is beyond all bounds. Two quads only where more than 8 are there."""
    is_quad = unit in ("quad", "two-quads")
    times = {"tile_time": 1e-9, "sum_time": 0.0 if unit == "tile" else 1e9}
    times |= {"quad_sum_time": -1e9 if is_quad else 1e9, "num_places": 8 if unit == "two-quads" else 1000}
    monkeypatch.setattr(KERNEL, "_load", lambda *args: KERNEL._Load(**times))


@pytest.fixture(params=UNITS)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, quads of 32, groups of 64; work handed out by the one or the other."""
    monkeypatch.setattr(KERNEL, "_WIDE_TYPE_TILE", 16)
    monkeypatch.setattr(KERNEL, "_QUAD", 2)
    monkeypatch.setattr(KERNEL, "_TILES", 4)
    hand_out(monkeypatch, request.param)


def arguments(
    starts: list[int], window: int, heads: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(window)
    blocks = 12
    query = torch.randn(len(starts), window, heads[0], 16, generator=generator)
    caches = torch.randn(2, len(starts) * blocks + 1, BLOCK_SIZE, heads[1], 16, generator=generator)
    table = torch.randperm(len(starts) * blocks, generator=generator).view(-1, blocks).int() + 1
    for row, start in enumerate(starts):
        table[row, max(-(-(start + window) // BLOCK_SIZE), 0) :] = -1
    return tuple(t.to(device) for t in (query, *caches, table, torch.tensor(starts)))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("first_position", [0, 1, 70])
@pytest.mark.parametrize(
    ("starts", "window", "heads"),
    [([61], 4, (4, 2)), ([0, 130, 63], 2, (2, 1)), ([20], 9, (4, 1)), ([128], 1, (3, 1))],
    ids=["across-groups", "rows", "wide-window", "odd-heads"],
)
def test_pieces_add_up(
    starts: list[int], window: int, heads: tuple[int, int], first_position: int, device: torch.device
) -> None:
    query, keys, values, table, positions = arguments(starts, window, heads, device)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, keys, values, table, positions, 0.3, first_position=first_position, out=out)
    expected = twin(query, keys, values, table, positions, 0.3, first_position=first_position)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("small_pieces")
def test_rows_without_keys_get_zeros(device: torch.device, is_interpreted: bool) -> None:
    """Rows that end before anything, beside one whose keys lie in three groups: all places are written."""
    query, keys, values, table, positions = arguments([100, 40, 0, -4], 3, (4, 2), device)
    ends = torch.tensor([103, 0, 1, 0], device=device)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, keys, values, table, positions, 0.3, first_position=1, end_positions=ends, out=out)
    is_triton = device.type == "cuda" or is_interpreted  # the twin looks at ends in float16 only
    assert bool((out[1:] == 0).all() if is_triton else out.isfinite().all())
    alone = paged_attention(query[:1], keys, values, table[:1], positions[:1], 0.3, first_position=1)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("window", [1, 4])
def test_the_result_does_not_depend_on_how_work_is_handed_out(
    window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, is_interpreted: bool
) -> None:
    """By the group, by two quads, by the quad and by the tile, alone and beside others: the same bits."""
    monkeypatch.setattr(KERNEL, "_WIDE_TYPE_TILE", 16)
    monkeypatch.setattr(KERNEL, "_QUAD", 2)
    monkeypatch.setattr(KERNEL, "_TILES", 4)
    starts, heads = ([100, 47, 96], (2, 2)) if is_interpreted else ([150, 47, 16, 95, 96], (4, 2))
    query, keys, values, table, positions = arguments(starts, window, heads, device)
    results = []
    for unit in UNITS:
        hand_out(monkeypatch, unit)
        result = paged_attention(query, keys, values, table, positions, 0.3)
        for rows in (slice(0, 1), slice(1, len(starts) - 1), slice(len(starts) - 1, len(starts))):
            some = paged_attention(query[rows], keys, values, table[rows], positions[rows], 0.3)
            assert torch.equal(some, result[rows]), (unit, rows)
        results.append(result)
    assert all(torch.equal(result, results[0]) for result in results)


@jit
def _decision_kernel(
    start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    limit: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    num_places: tl.tensor,
    units_of_rows: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    _, _, _, pieces, keys, at_once = units_of_rows(
        start_ptr, start_ptr, num_rows, limit, 0, window, tile_time, sum_time, quad_sum_time, num_places,
        64, TILE, QUAD, GROUP, False,
    )  # fmt: skip
    tl.store(out_ptr, keys * at_once // TILE)
    tl.store(out_ptr + 1, tl.sum(pieces, 0))


def decision(
    starts: list[int],
    window: int,
    items: int,
    device: torch.device,
    *,
    warps: int = 4,
    heads_per_program: int = 1,
) -> tuple[int, int]:
    """(tiles that a program takes, pieces) on 132 multiprocessors. heads_per_program: of the second kernel."""
    load = KERNEL._load(items, window, 132, warps, heads_per_program)
    out = torch.zeros(2, dtype=torch.int32, device=device)
    positions = torch.tensor(starts, device=device)
    limit = max(starts) + window
    _decision_kernel[(1,)](
        positions, out, len(starts), limit, window, *load, KERNEL._units_of_rows, 128, 4 * 128, 16 * 128,
        enable_fp_fusion=False,
    )  # fmt: skip
    tiles, pieces = out.tolist()
    return tiles, pieces


@pytest.fixture
def hands_out(device: torch.device, is_interpreted: bool) -> torch.device:
    if device.type == "cpu" and not is_interpreted:
        pytest.skip("the twin hands out no work")
    return device


def test_the_longest_row_and_all_tiles_decide(hands_out: torch.device) -> None:
    """Windows of four, eight kv heads: rows of equal length, then one long row among short ones."""
    ways = {
        (1, 252): 1,
        (4, 252): 16,
        (4, 380): 1,
        (8, 380): 16,
        (8, 508): 1,
        (12, 508): 16,
        (8, 1020): 4,
        (32, 1020): 16,
        (1, 4000): 1,
        (1, 8192): 4,
        (4, 4092): 4,
        (8, 2000): 4,
        (8, 4092): 8,
        (16, 2044): 8,
        (20, 2044): 16,
        (1, 16_000): 4,
        (1, 30_000): 8,
        (1, 45_000): 16,
    }
    decided = {(rows, keys): decision([keys - 4] * rows, 4, 8, hands_out)[0] for rows, keys in ways}
    assert decided == ways
    assert decision([1016] + [1] * 15, 4, 8, hands_out) == (1, 8 + 15)
    assert [decision([keys - 1], 1, 8, hands_out)[0] for keys in (4000, 8192)] == [1, 4]


def test_sums_of_many_heads_weigh(hands_out: torch.device) -> None:
    """Which a program of the second kernel makes one after the other: rather by the group, which leaves none."""
    ways = [decision([1016] * 14, 4, 8, hands_out, heads_per_program=heads)[0] for heads in (1, 4, 8)]
    assert ways == [4, 4, 16]


def test_programs_alone_on_a_multiprocessor_rather_take_quads(hands_out: torch.device) -> None:
    """Windows of 28 queries, of eight warps."""
    ways = {
        (1, 4000): 1,
        (1, 8192): 4,
        (8, 1020): 1,
        (8, 2044): 4,
        (16, 508): 16,
        (16, 1020): 4,
        (16, 2044): 8,
        (32, 1020): 16,
    }
    heads = {rows: max(rows // 8, 1) for rows, _ in ways}
    decided = {
        (rows, keys): decision([keys - 4] * rows, 4, 4, hands_out, warps=8, heads_per_program=heads[rows])[0]
        for rows, keys in ways
    }
    assert decided == ways


def test_partial_results_have_room(hands_out: torch.device) -> None:
    """Of rows of all lengths, for one to 64 items a tile."""
    generator = torch.Generator().manual_seed(0)
    ways = set()
    for longest in (200, 2000, 20_000):
        for rows in (1, 3, 20, 64):
            for items in (1, 8, 64):
                starts = torch.randint(0, longest, (rows,), generator=generator).tolist()
                tiles, pieces = decision(starts, 4, items, hands_out)
                load = KERNEL._load(items, 4, 132, 4, 1)
                assert pieces <= KERNEL._most_pieces(rows, max(starts) + 4, 128, load)
                ways.add(tiles)
    assert ways == {1, 4, 8, 16}


@pytest.mark.usefixtures("small_pieces")
def test_padding_rows_get_finite_values_and_disturb_nobody(device: torch.device) -> None:
    """A row whose blocks are taken away, and one that stands before the first position."""
    query, keys, values, table, positions = arguments([70, 90, 0], 2, (2, 1), device)
    alone = paged_attention(query[:1], keys, values, table[:1], positions[:1], 0.3)
    table[1] = -1
    keys[0] = values[0] = 0
    result = paged_attention(query, keys, values, table, positions, 0.3, first_position=0)
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result[:1], alone, rtol=0, atol=TOLERANCE)
    result = paged_attention(query, keys, values, table, positions, 0.3, first_position=5)
    assert bool((result[2] == 0).all())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize(
    ("heads", "small_pieces"),
    [((2, 1), "group"), ((2, 1), "two-quads"), ((2, 1), "tile"), ((36, 1), "group")],
    ids=["window-groups", "window-quads", "window-tiles", "prefill"],
    indirect=["small_pieces"],
)
def test_what_stands_behind_the_end_does_not_matter(
    heads: tuple[int, int], first_position: int, device: torch.device, is_interpreted: bool
) -> None:
    """A window of which three places, one place and none are there; what stands behind them, or before the first
    position, is not a number."""
    starts = [61, 130, 1]
    query, keys, values, table, positions = arguments(starts, 4, heads, device)
    ends = torch.tensor([64, 131, 0], device=device)
    expected = twin(query, keys, values, table, positions, 0.3, first_position=first_position)
    for cache in (keys, values):
        for row, end in enumerate(ends.tolist()):
            blocks = table[row].clamp(min=0).long()
            places = torch.arange(len(blocks) * BLOCK_SIZE, device=device)
            before = (
                first_position if heads[0] == 2 else 0
            )  # wide windows do read what stands before, with weight 0
            places = places[(places >= end) | (places < before)]
            is_granted = table[row, places // BLOCK_SIZE] >= 0
            places = places[is_granted]
            cache[blocks[places // BLOCK_SIZE], places % BLOCK_SIZE] = torch.nan
    if query.device.type == "cpu" and not is_interpreted:
        query, keys, values = query.half(), keys.half(), values.half()
    result = paged_attention(
        query, keys, values, table, positions, 0.3, first_position=first_position, end_positions=ends
    )
    for row, width in enumerate((3, 1, 0)):
        tolerance = 2e-3 if query.dtype == torch.float16 else TOLERANCE
        torch.testing.assert_close(result[row, :width].float(), expected[row, :width], rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (32, 4), (28, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_gets_the_same_bits_in_any_window_and_batch(
    heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one and of two tiles of queries; work handed out as its amount has it, then in each way."""
    rows, window, blocks = 70, 9, 200
    shape = rows * blocks, BLOCK_SIZE, heads[1], head_dim
    keys, values = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks)
    positions = torch.randint(0, blocks * BLOCK_SIZE - window, (rows,), device="cuda")
    positions[:3] = torch.tensor([3000, 1020, 0])
    query = torch.randn(rows, window, heads[0], head_dim, device="cuda", dtype=torch.bfloat16)
    together = paged_attention(query, keys, values, table, positions, 0.1)
    expected = twin(query.double(), keys.double(), values.double(), table, positions, 0.1)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=2e-2)
    for width in (1, 2, 4, 5, 9):
        for some in (slice(0, 1), slice(1, 3), slice(0, rows)):
            result = paged_attention(query[some, :width], keys, values, table[some], positions[some], 0.1)
            assert torch.equal(result, together[some, :width]), (width, some)
    for unit in UNITS:
        hand_out(monkeypatch, unit)
        for width in (1, 4):
            result = paged_attention(query[:12, :width], keys, values, table[:12], positions[:12], 0.1)
            assert torch.equal(result, together[:12, :width]), (unit, width)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths() -> None:
    rows, blocks = 4, 512
    caches = torch.randn(2, rows * blocks, BLOCK_SIZE, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(rows * blocks, device="cuda").view(rows, blocks)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    query = torch.randn(rows, 4, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, *caches, table, positions, 0.1, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(query, *caches, table, positions, 0.1, out=out)
    for lengths in ([5, 100, 0, 2000], [8188, 8188, 8188, 8188], [-4, 1023, 1024, 7]):
        positions.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, paged_attention(query, *caches, table, positions, 0.1))
        assert not bool(out.isnan().any())
