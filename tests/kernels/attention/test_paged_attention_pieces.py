"""The kernel of paged_attention where contexts reach over tiles and groups, made small for the
interpreter."""

from typing import Any

import pytest
import torch
from headway_testing.late import LateCopy

from headway.kernels import (
    ScoreRule,
    paged_attention,
    prefill_attention,
    qkv_rope_append,
    rms_norm,
    rope_append,
)
from headway.kernels.attention import dispatch
from headway.kernels.attention._split_kv_plan import split_rows
from headway.kernels.reference.attention.paged_attention import paged_attention as twin
from headway.kernels.runtime._triton import jit, tl

BLOCK_SIZE = 16
TOLERANCE = 3e-6
# Windows that begin in a row's first group, tile by tile, and in later ones.
RULES = {
    "full": ScoreRule(0.3),
    "first-1": ScoreRule(0.3, first_position=1),
    "first-40": ScoreRule(0.3, first_position=40),
    "first-70": ScoreRule(0.3, first_position=70),
    "window-1": ScoreRule(0.3, window=1),
    "window-16": ScoreRule(0.3, window=16, first_position=1),
    "window-17": ScoreRule(0.3, soft_cap=2.0, window=17),
    "window-100": ScoreRule(0.3, window=100),
    "soft-cap": ScoreRule(0.3, soft_cap=2.0),
}
UNITS = "group", "two-quads", "quad", "tile"
# What stores the keys in front of attention: query heads, heads of keys, head_dim, hidden.
FRONTS = {"streamed": (32, 8, 128, 4096), "skinny": (4, 2, 64, 256), "apart": (4, 2, 64, 256)}


def hand_out(monkeypatch: pytest.MonkeyPatch, unit: str, num_pairs: int = 8) -> None:
    """All work by the unit: what the others' sums take is beyond all bounds. By two quads if these make at
    most num_pairs, and there are more quads."""
    is_quad = unit in ("quad", "two-quads")
    times = {"tile_time": 1e-9, "sum_time": 0.0 if unit == "tile" else 1e9}
    times |= {"quad_sum_time": -1e9 if is_quad else 1e9}
    times |= {"quads_at_once": num_pairs if unit == "two-quads" else 100_000}
    monkeypatch.setattr(dispatch, "split_kv_costs", lambda *args: dispatch.SplitKvCosts(**times))


def num_pairs_of(ends: list[int], quad: int) -> int:
    """Of quads, for rows that end there."""
    return sum(-(-end // (2 * quad)) for end in ends)


@pytest.fixture(params=UNITS)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, quads of 32, groups of 64; work handed out by the one or the other: by two quads from
    9 of them on, up to 8 pairs."""
    monkeypatch.setattr(dispatch, "_WIDE_TYPE_TILE", 16)
    monkeypatch.setattr(dispatch, "QUAD_TILES", 2)
    monkeypatch.setattr(dispatch, "GROUP_TILES", 4)
    hand_out(monkeypatch, request.param)


def in_units(*interpreted: str) -> pytest.MarkDecorator:
    """Work handed out by each unit; in the interpreter's plain run by these alone."""
    units = [
        pytest.param(unit, marks=() if unit in interpreted else pytest.mark.interpreted_long)
        for unit in UNITS
    ]
    return pytest.mark.parametrize("small_pieces", units, indirect=True)


def arguments(
    starts: list[int], window: int, heads: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(window)
    blocks = max(-(-(max(starts) + window) // BLOCK_SIZE), 12)
    query = torch.randn(len(starts), window, heads[0], 16, generator=generator)
    caches = torch.randn(2, len(starts) * blocks + 1, BLOCK_SIZE, heads[1], 16, generator=generator)
    table = torch.randperm(len(starts) * blocks, generator=generator).view(-1, blocks).int() + 1
    for row, start in enumerate(starts):
        table[row, max(-(-(start + window) // BLOCK_SIZE), 0) :] = -1
    return tuple(t.to(device) for t in (query, *caches, table, torch.tensor(starts)))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("starts", "window", "heads"),
    [
        ([61], 4, (4, 2)),
        ([0, 130, 63], 2, (2, 1)),
        ([20], 9, (4, 1)),
        ([128], 1, (3, 1)),
        ([159, 47, 95], 1, (2, 1)),
        ([600], 1, (1, 1)),
        ([151, 87, 60], 9, (4, 1)),
    ],
    ids=["across-groups", "rows", "wide-window", "odd-heads", "odd-quads", "many-groups", "wide-pairs"],
)
def test_pieces_add_up(
    starts: list[int], window: int, heads: tuple[int, int], rule: ScoreRule, device: torch.device
) -> None:
    query, keys, values, table, positions = arguments(starts, window, heads, device)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, keys, values, table, positions, rule, out=out)
    expected = twin(query, keys, values, table, positions, rule)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


@in_units("two-quads", "tile")
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("rule", [RULES["first-1"], RULES["window-16"]], ids=["full", "window"])
def test_rows_without_keys_get_zeros(rule: ScoreRule, device: torch.device, is_interpreted: bool) -> None:
    """Rows that end before anything, or before their window, beside one whose keys lie in five groups: all
    places are written."""
    heads = (2, 1) if is_interpreted else (4, 2)
    query, keys, values, table, positions = arguments([290, 40, 0, -4, 290], 3, heads, device)
    ends = torch.tensor([293, 0, 1, 0, 0 if rule.window == 0 else 270], device=device)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, keys, values, table, positions, rule, end_positions=ends, out=out)
    is_triton = device.type == "cuda" or is_interpreted  # the twin looks at ends in float16 only
    assert bool((out[1:] == 0).all() if is_triton else out.isfinite().all())
    alone = paged_attention(query[:1], keys, values, table[:1], positions[:1], rule)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("rule", [RULES["full"], RULES["window-100"], RULES["window-17"]], ids=str)
@pytest.mark.parametrize("window", [1, pytest.param(4, marks=pytest.mark.interpreted_long)])
def test_the_result_does_not_depend_on_how_work_is_handed_out(
    window: int, rule: ScoreRule, device: torch.device, monkeypatch: pytest.MonkeyPatch, is_interpreted: bool
) -> None:
    """By the group, by two quads, by the quad and by the tile, alone and beside others: the same bits."""
    monkeypatch.setattr(dispatch, "_WIDE_TYPE_TILE", 16)
    monkeypatch.setattr(dispatch, "QUAD_TILES", 2)
    monkeypatch.setattr(dispatch, "GROUP_TILES", 4)
    # Where the window is of one, two rows end on the border of a quad.
    # The longest has more groups than are summed at a time.
    starts, heads = ([303, 47, 95], (2, 1)) if is_interpreted else ([159, 47, 16, 95, 607], (4, 2))
    query, keys, values, table, positions = arguments(starts, window, heads, device)
    results = []
    for unit in UNITS:
        hand_out(monkeypatch, unit, num_pairs_of([start + window for start in starts], 32))
        result = paged_attention(query, keys, values, table, positions, rule)
        for rows in (slice(0, 1), slice(1, len(starts) - 1), slice(len(starts) - 1, len(starts))):
            some = paged_attention(query[rows], keys, values, table[rows], positions[rows], rule)
            assert torch.equal(some, result[rows]), (unit, rows)
        results.append(result)
    assert all(torch.equal(result, results[0]) for result in results)


@jit
def _decision_kernel(
    start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    limit: tl.tensor,
    sliding_window: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    quads_at_once: tl.tensor,
    units_of_rows: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    _, _, _, pieces, keys, at_once = units_of_rows(
        start_ptr, start_ptr, num_rows, limit, 0, sliding_window, window, tile_time, sum_time, quad_sum_time,
        quads_at_once, 64, TILE, QUAD, GROUP, False,
    )  # fmt: skip
    tl.store(out_ptr, keys * at_once // TILE)
    tl.store(out_ptr + 1, tl.sum(pieces, 0))


def load_of(rows: int, heads: tuple[int, int], window: int) -> Any:
    """On 132 multiprocessors, of (q_heads, kv_heads) x 128."""
    warps = 4 if window * heads[0] // heads[1] <= 16 else 8
    return dispatch.split_kv_costs(
        heads[1], window, 132, warps, dispatch.combined_heads(rows, window, heads[0])
    )


def decision(
    starts: list[int], window: int, load: Any, device: torch.device, sliding_window: int | None = None
) -> tuple[int, int]:
    """(tiles that a program takes, pieces)."""
    out = torch.zeros(2, dtype=torch.int32, device=device)
    positions = torch.tensor(starts, device=device)
    limit = max(starts) + window
    _decision_kernel[(1,)](
        positions, out, len(starts), limit, sliding_window, window, *load, split_rows, 128, 4 * 128, 16 * 128,
        enable_fp_fusion=False,
    )  # fmt: skip
    tiles, pieces = out.tolist()
    return tiles, pieces


@pytest.fixture
def hands_out(device: torch.device, is_interpreted: bool) -> torch.device:
    if device.type == "cpu" and not is_interpreted:
        pytest.skip("the twin hands out no work")
    return device


WAYS: dict[str, tuple[tuple[int, int], int, dict[tuple[int, int], int]]] = {
    # (q_heads, kv_heads), window, tiles that a program takes by (rows, keys of each)
    "mimo": (
        (32, 8),
        4,
        {
            (1, 252): 1,
            (1, 4000): 1,
            (1, 8192): 4,
            (1, 16_000): 4,
            (1, 30_000): 8,
            (1, 45_000): 16,
            (4, 252): 16,
            (4, 380): 1,
            (4, 4092): 4,
            (8, 380): 16,
            (8, 508): 1,
            (8, 1020): 1,
            (8, 2000): 4,
            (8, 4092): 8,
            (12, 508): 16,
            (12, 1020): 4,
            (16, 1020): 4,
            (16, 2044): 8,
            (20, 2044): 16,
            (32, 1020): 16,
        },
    ),
    "depth-0": ((32, 8), 1, {(1, 4000): 1, (1, 8192): 4, (8, 2000): 4, (16, 1020): 4}),
    "eight-warps": (
        (28, 4),
        4,
        {
            (1, 4000): 1,
            (1, 8192): 4,
            (1, 30_000): 8,
            (8, 1020): 1,
            (8, 2044): 4,
            (8, 4092): 8,
            (16, 508): 16,
            (16, 1020): 4,
            (16, 2044): 8,
            (32, 1020): 16,
        },
    ),
    # Of 66 at a time: 40 rows of three quads are 80 pairs.
    "odd-quads": ((16, 4), 1, {(20, 1530): 4, (40, 1530): 4, (24, 2044): 8}),
}


@pytest.mark.parametrize(("heads", "window", "ways"), WAYS.values(), ids=WAYS)
def test_what_a_program_takes_is_what_measured_best(
    heads: tuple[int, int], window: int, ways: dict[tuple[int, int], int], hands_out: torch.device
) -> None:
    """Rows of equal length."""
    decided = {
        (rows, keys): decision([keys - window] * rows, window, load_of(rows, heads, window), hands_out)[0]
        for rows, keys in ways
    }
    assert decided == ways


def test_the_longest_row_decides_among_short_ones(hands_out: torch.device) -> None:
    assert decision([1016] + [1] * 15, 4, load_of(16, (32, 8), 4), hands_out) == (1, 8 + 15)


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_of_long_contexts_have_the_pieces_of_their_windows(rows: int, hands_out: torch.device) -> None:
    """Counted from the group in which a window begins."""
    load = load_of(rows, (32, 8), 4)
    far = decision([2048 * 60 + 1500] * rows, 4, load, hands_out, sliding_window=1024)
    assert far == decision([1500] * rows, 4, load, hands_out, sliding_window=1024)


def test_partial_results_have_room(hands_out: torch.device) -> None:
    """Of rows of all lengths, for one to 64 items a tile; then where all goes by the quad."""
    generator = torch.Generator().manual_seed(0)
    ways = set()
    by_quad = dispatch.SplitKvCosts(tile_time=8.0, sum_time=100.0, quad_sum_time=-100.0, quads_at_once=40)
    for longest in (200, 2000, 20_000):
        for rows in (1, 3, 20, 64):
            for load in (*(dispatch.split_kv_costs(items, 4, 132, 4, 1) for items in (1, 8, 64)), by_quad):
                starts = torch.randint(0, longest, (rows,), generator=generator).tolist()
                tiles, pieces = decision(starts, 4, load, hands_out)
                assert pieces <= dispatch.most_pieces(rows, max(starts) + 4, 128, load)
                ways.add(tiles)
                _, pieces = decision(starts, 4, load, hands_out, sliding_window=300)
                assert pieces <= dispatch.most_pieces(rows, min(max(starts), 300 + 2048) + 4, 128, load)
    assert ways == {1, 4, 8, 16}


@in_units("group", "quad")
@pytest.mark.usefixtures("small_pieces")
def test_padding_rows_get_finite_values_and_disturb_nobody(device: torch.device) -> None:
    """A row whose blocks are taken away, and one that stands before the first position."""
    query, keys, values, table, positions = arguments([170, 190, 0], 2, (2, 1), device)
    alone = paged_attention(query[:1], keys, values, table[:1], positions[:1], ScoreRule(0.3))
    table[1] = -1
    keys[0] = values[0] = 0
    result = paged_attention(query, keys, values, table, positions, ScoreRule(0.3))
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result[:1], alone, rtol=0, atol=TOLERANCE)
    result = paged_attention(query, keys, values, table, positions, ScoreRule(0.3, first_position=5))
    assert bool((result[2] == 0).all())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize(
    ("heads", "small_pieces"),
    [
        ((2, 1), "group"),
        ((2, 1), "two-quads"),
        ((2, 1), "tile"),
        pytest.param((36, 1), "group", marks=pytest.mark.interpreted_long),
    ],
    ids=["window-groups", "window-quads", "window-tiles", "prefill"],
    indirect=["small_pieces"],
)
def test_what_stands_behind_the_end_does_not_matter(
    heads: tuple[int, int], first_position: int, device: torch.device, is_interpreted: bool
) -> None:
    """A window of which three places, one place and none are there; what stands behind them, or before the
    first position, is not a number."""
    starts = [61, 230, 1]
    query, keys, values, table, positions = arguments(starts, 4, heads, device)
    ends = torch.tensor([64, 231, 0], device=device)
    expected = twin(query, keys, values, table, positions, ScoreRule(0.3, first_position=first_position))
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
    attend = paged_attention if heads[0] == 2 else prefill_attention
    result = attend(
        query,
        keys,
        values,
        table,
        positions,
        ScoreRule(0.3, first_position=first_position),
        end_positions=ends,
    )
    for row, width in enumerate((3, 1, 0)):
        tolerance = 2e-3 if query.dtype == torch.float16 else TOLERANCE
        torch.testing.assert_close(result[row, :width].float(), expected[row, :width], rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (32, 4), (28, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "rule", [ScoreRule(0.1), ScoreRule(0.1, window=129), ScoreRule(0.1, soft_cap=20.0, window=1024)], ids=str
)
def test_a_query_gets_the_same_bits_in_any_window_and_batch(
    rule: ScoreRule, heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one and of two tiles of queries; work handed out as its amount has it, then in each way."""
    rows, window, blocks = 70, 9, 200
    shape = rows * blocks, BLOCK_SIZE, heads[1], head_dim
    keys, values = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks)
    positions = torch.randint(0, blocks * BLOCK_SIZE - window, (rows,), device="cuda")
    positions[:3] = torch.tensor([3000, 1020, 0])
    query = torch.randn(rows, window, heads[0], head_dim, device="cuda", dtype=torch.bfloat16)
    together = paged_attention(query, keys, values, table, positions, rule)
    expected = twin(query.double(), keys.double(), values.double(), table, positions, rule)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=2e-2)
    for width in (1, 2, 4, 5, 9):
        for some in (slice(0, 1), slice(1, 3), slice(0, rows)):
            result = paged_attention(query[some, :width], keys, values, table[some], positions[some], rule)
            assert torch.equal(result, together[some, :width]), (width, some)
    quad = dispatch.QUAD_TILES * dispatch.split_kv_tile(head_dim, 2)
    for unit in UNITS:
        for width in (1, 4):
            ends = [position + width for position in positions[:12].tolist()]
            hand_out(monkeypatch, unit, num_pairs_of(ends, quad))
            result = paged_attention(query[:12, :width], keys, values, table[:12], positions[:12], rule)
            assert torch.equal(result, together[:12, :width]), (unit, width)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [ScoreRule(0.1), ScoreRule(0.1, window=1000)], ids=str)
def test_a_captured_graph_follows_the_lengths(rule: ScoreRule) -> None:
    rows, blocks = 4, 512
    caches = torch.randn(2, rows * blocks, BLOCK_SIZE, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(rows * blocks, device="cuda").view(rows, blocks)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    query = torch.randn(rows, 4, 32, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, *caches, table, positions, rule, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(query, *caches, table, positions, rule, out=out)
    for lengths in ([5, 100, 0, 2000], [8188, 8188, 8188, 8188], [-4, 1023, 1024, 7]):
        positions.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, paged_attention(query, *caches, table, positions, rule))
        assert not bool(out.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("front", FRONTS)
def test_where_keys_are_is_read_when_it_is_there(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model's first layer: what writes block tables and positions, a norm that lets others start
    before it waits, what stores the keys, this."""
    copy_late = LateCopy(monkeypatch)
    heads, kv_heads, head_dim, hidden = FRONTS[front]
    rows, window, blocks = 2, 4, 8
    wanted = torch.zeros(32, dtype=torch.int64, device="cuda")
    wanted[: rows * blocks] = torch.randperm(rows * blocks)
    wanted[-rows:] = torch.tensor([90, 124])
    places = torch.empty_like(wanted)
    table, starts = places[: rows * blocks].view(rows, blocks), places[-rows:]
    caches = torch.randn(2, rows * blocks, BLOCK_SIZE, kv_heads, head_dim).to("cuda", torch.bfloat16)
    all_heads = [heads, kv_heads, kv_heads]
    weight = torch.randn(sum(all_heads) * head_dim, hidden).to(caches) * hidden**-0.5
    gain, bias = torch.ones(hidden).to(caches), torch.zeros_like(weight[:, 0])
    x = torch.randn(rows * window, hidden).to(caches)
    projected = torch.randn(rows * window, sum(all_heads), head_dim).to(caches)
    query, key, value = projected.split(all_heads, dim=1)
    # Turned by no angle, stored nowhere.
    angles = torch.tensor([[1.0, 0.0]], device="cuda").repeat_interleave(head_dim // 2, dim=1)
    positions = torch.zeros(rows * window, dtype=torch.int64, device="cuda")
    at = positions, angles, *caches, torch.full_like(positions, -1)

    def attend() -> torch.Tensor:
        normed = rms_norm(x, gain, 1e-6)
        if front == "apart":
            rope_append(query, key, value, *at)
        turned = query if front == "apart" else qkv_rope_append(normed, weight, bias, None, *at)
        return paged_attention(
            turned.view(rows, window, heads, head_dim), *caches, table, starts, ScoreRule(0.1)
        )

    places.zero_()
    elsewhere = attend()
    places.copy_(wanted)
    expected = attend()
    assert not torch.equal(elsewhere, expected)
    for _ in range(5):
        places.zero_()
        copy_late(wanted, places)
        assert torch.equal(attend(), expected)
