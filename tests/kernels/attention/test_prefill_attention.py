"""prefill_attention against softmax over the visible keys, and that chunks do not change a result."""

import itertools
import sys

import pytest
import torch

from headway.kernels import ScoreRule, paged_attention, prefill_attention

KERNEL = sys.modules["headway.kernels.attention.prefill_attention"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
GUARD = 1e4


class Prompt:
    """One row a start, in shuffled blocks; unused entries are -1 and unused cells hold GUARD."""

    def __init__(
        self,
        starts: list[int],
        window: int,
        device: torch.device,
        *,
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(starts) + window)
        length, (q_heads, kv_heads) = max(starts) + window, heads
        blocks = -(-length // block_size)
        self.starts, self.scale = torch.tensor(starts, device=device), head_dim**-0.5
        ids = torch.randperm(len(starts) * blocks + 1, generator=generator)[1:].view(-1, blocks)
        shape = len(starts), blocks * block_size, kv_heads, head_dim
        self.keys, self.values = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)
        caches = torch.full((2, len(ids) * blocks + 1, block_size, kv_heads, head_dim), GUARD, dtype=dtype)
        caches[:, ids.flatten()] = torch.stack((self.keys, self.values)).reshape(
            2, -1, block_size, kv_heads, head_dim
        )
        for row, start in enumerate(starts):
            used = -(-(start + window) // block_size)
            caches[:, ids[row, used:]] = torch.nan
            ids[row, used:] = -1
            if tail := used * block_size - start - window:
                caches[:, ids[row, used - 1], -tail:] = GUARD
        self.caches, self.table = caches.to(device), ids.int().to(device)
        self.query = torch.randn(len(starts), window, q_heads, head_dim, generator=generator).to(
            device, dtype
        )

    def rule(self, soft_cap: float = 0.0, first_position: int = 0, window: int = 0) -> ScoreRule:
        return ScoreRule(self.scale, soft_cap, first_position, window)

    def run(self, first: int = 0, last: int | None = None, *, rule: ScoreRule | None = None) -> torch.Tensor:
        return prefill_attention(
            self.query[:, first:last], *self.caches, self.table, self.starts + first, rule or self.rule()
        )

    def expected(self, rule: ScoreRule | None = None) -> torch.Tensor:
        _, cap, first_position, window = rule or self.rule()
        sharing = self.query.shape[2] // self.keys.shape[2]
        k, v = (t.double().repeat_interleave(sharing, 2) for t in (self.keys, self.values))
        position = self.starts.cpu()[:, None] + torch.arange(self.query.shape[1])
        token = torch.arange(k.shape[1])
        is_visible = (token <= position[..., None]) & (token >= first_position)
        is_visible &= token > position[..., None] - (window or len(token) + 1)
        scores = torch.einsum("rwhd,rthd->rhwt", self.query.double().cpu(), k) * self.scale
        scores = cap * (scores / cap).tanh() if cap else scores
        weights = scores.masked_fill(~is_visible[:, None], -torch.inf).softmax(-1).nan_to_num(0)
        return torch.einsum("rhwt,rthd->rwhd", weights, v)


# Soft caps and sliding windows: of less than a tile, of a tile, of a tile and one, across groups.
RULES = [(0.0, 0), (0.0, 1), (0.0, 127), (0.0, 128), (20.0, 129), (0.0, 1024), (20.0, 0)]
CASES = {"whole": ([0], 50), "after-a-prefix": ([37], 33), "two-rows": ([0, 70], 20), "one": ([64], 1)}


@pytest.mark.parametrize(("starts", "window"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_softmax_over_the_visible_keys(
    starts: list[int], window: int, block_size: int, device: torch.device
) -> None:
    prompt = Prompt(starts, window, device, block_size=block_size)
    torch.testing.assert_close(prompt.run().double().cpu(), prompt.expected(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("first_position", [1, 40])
def test_keys_before_the_first_position_are_not_seen(first_position: int, device: torch.device) -> None:
    prompt = Prompt([20], 45, device)
    rule = prompt.rule(first_position=first_position)
    result = prompt.run(rule=rule).double().cpu()
    torch.testing.assert_close(result, prompt.expected(rule), rtol=0, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("starts", "window"), [([0], 700), ([1000, 13], 130)], ids=["whole", "rows"])
@pytest.mark.parametrize("first_position", [0, 1])
def test_types_and_head_sizes(
    starts: list[int], window: int, first_position: int, head_dim: int, dtype: torch.dtype
) -> None:
    prompt = Prompt(starts, window, torch.device("cuda"), heads=(8, 2), head_dim=head_dim, dtype=dtype)
    prompt.caches[:, prompt.table[0, 0], :first_position] = GUARD
    rule = prompt.rule(first_position=first_position)
    result = prompt.run(rule=rule).double().cpu()
    torch.testing.assert_close(result, prompt.expected(rule), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(("soft_cap", "sliding_window"), RULES)
def test_how_a_prompt_is_cut_does_not_change_a_bit(soft_cap: float, sliding_window: int) -> None:
    prompt = Prompt([100], 1000, torch.device("cuda"), heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    rule = prompt.rule(soft_cap, window=sliding_window)
    whole = prompt.run(rule=rule)
    for cuts in ([0, 512, 1000], [0, 1, 300, 999, 1000]):
        parts = [prompt.run(a, b, rule=rule) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts, 1), whole)


def assert_bits_of_decode_windows(prompt: Prompt, rule: ScoreRule) -> None:
    window = prompt.query.shape[1]
    expected = torch.empty_like(prompt.query)
    for first in range(0, window, 3):
        places = slice(first, min(first + 3, window))
        paged_attention(
            prompt.query[:, places], *prompt.caches, prompt.table, prompt.starts + first, rule,
            out=expected[:, places],
        )  # fmt: skip
    assert torch.equal(prompt.run(rule=rule), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((28, 4), 128), ((14, 2), 64), ((8, 8), 64), ((4, 2), 256)])
@pytest.mark.parametrize(
    ("starts", "window"),
    [([0], 1), ([0, 511], 5), ([0, 1000], 130), ([2040, 5000, 77], 300), ([9000], 257), ([3000], 1500)],
    ids=str,
)
def test_prompts_have_the_bits_of_decode_windows(
    starts: list[int], window: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    """Within tiles, quads, groups and beyond: whichever kernel computes a query, its sums have one order."""
    prompt = Prompt(starts, window, torch.device("cuda"), heads=heads, head_dim=head_dim, dtype=dtype)
    assert_bits_of_decode_windows(prompt, prompt.rule())


@pytest.mark.gpu
@pytest.mark.parametrize(("soft_cap", "sliding_window"), RULES)
@pytest.mark.parametrize(("heads", "head_dim"), [((28, 4), 128), ((16, 4), 64), ((4, 2), 256)])
@pytest.mark.parametrize(
    ("starts", "window"), [([0, 511], 5), ([2040, 5000, 77], 300), ([9000], 257)], ids=str
)
def test_prompts_have_the_bits_of_decode_windows_by_any_rule(
    starts: list[int],
    window: int,
    heads: tuple[int, int],
    head_dim: int,
    soft_cap: float,
    sliding_window: int,
) -> None:
    prompt = Prompt(
        starts, window, torch.device("cuda"), heads=heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    assert_bits_of_decode_windows(prompt, prompt.rule(soft_cap, window=sliding_window))


def assert_streamed_has_the_same_bits(
    prompt: Prompt, rule: ScoreRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KERNEL.streams_attention(prompt.query, *prompt.caches, rule)
    streamed = prompt.run(rule=rule)
    monkeypatch.setattr(KERNEL, "streams_attention", lambda *_: False)
    assert torch.equal(streamed, prompt.run(rule=rule))
    torch.testing.assert_close(
        streamed.double().cpu(), prompt.expected(rule), rtol=0, atol=TOLERANCE[torch.bfloat16]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (6, 2), (64, 4)], ids=str)
@pytest.mark.parametrize(
    ("starts", "window"),
    [
        ([0], 1),
        ([5000], 1),
        ([63, 0, 640], 33),
        ([1, 64], 128),
        ([0], 700),
        ([3000], 300),
        ([-2, -60, 7], 70),
    ],
    ids=str,
)
def test_what_hopper_streams_has_the_same_bits(
    starts: list[int],
    window: int,
    heads: tuple[int, int],
    block_size: int,
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries before the first key among them."""
    prompt = Prompt(
        starts, window, hopper, heads=heads, head_dim=128, block_size=block_size, dtype=torch.bfloat16
    )
    assert_streamed_has_the_same_bits(prompt, prompt.rule(), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("soft_cap", "sliding_window"), RULES)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((6, 2), 64), ((16, 4), 256), ((3, 1), 256)])
@pytest.mark.parametrize(
    ("starts", "window"), [([5000], 1), ([63, 0, 2640], 33), ([3000], 300), ([-2, -60, 7], 70)], ids=str
)
def test_what_hopper_streams_has_the_same_bits_by_any_rule(
    starts: list[int],
    window: int,
    heads: tuple[int, int],
    head_dim: int,
    soft_cap: float,
    sliding_window: int,
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = Prompt(starts, window, hopper, heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    assert_streamed_has_the_same_bits(prompt, prompt.rule(soft_cap, window=sliding_window), monkeypatch)


@pytest.mark.gpu
def test_what_hopper_streams_begins_at_the_first_tile_of_a_window(hopper: torch.device) -> None:
    """Not a number stands in every tile that no query sees."""
    prompt = Prompt([3000], 40, hopper, heads=(32, 8), head_dim=128, dtype=torch.bfloat16)
    rule = prompt.rule(window=1000)
    assert KERNEL.streams_attention(prompt.query, *prompt.caches, rule)
    expected = prompt.run(rule=rule)
    prompt.caches[:, prompt.table[0, : 2001 // 128 * 128 // 16]] = torch.nan
    assert torch.equal(prompt.run(rule=rule), expected)


@pytest.mark.parametrize(("first_position", "end"), [(0, None), (1, None), (0, 9)], ids=str)
def test_what_is_streamed_has_no_end_positions(
    first_position: int, end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, caches = torch.zeros(1, 5, 2, 128), torch.zeros(2, 1, 16, 1, 128)
    streamed: list[torch.Tensor] = []
    monkeypatch.setattr(KERNEL, "takes_triton", lambda _: True)
    monkeypatch.setattr(KERNEL, "streams_attention", lambda *_: True)
    monkeypatch.setattr(KERNEL, "streamed_windows", lambda *given, **_: streamed.append(given[-1]))
    monkeypatch.setattr(KERNEL, "_prefill_kernel", {(2, 1, 1): lambda *_, **__: None})
    starts = torch.tensor([4])
    ends = None if end is None else torch.tensor([end])
    result = prefill_attention(
        query, *caches, torch.zeros(1, 1, dtype=torch.int64), starts, ScoreRule(1.0, first_position=first_position), end_positions=ends,
    )  # fmt: skip
    assert [out is result for out in streamed] == [True] * (end is None)


def test_only_rows_without_gaps_are_streamed() -> None:
    query = torch.empty(3, 40, 8, 128)
    assert KERNEL._are_flat(query, query)
    assert KERNEL._are_flat(query[:1, 5:30], torch.empty(1, 25, 8, 128))
    assert not KERNEL._are_flat(query[:, 5:30], torch.empty(3, 25, 8, 128))
    assert not KERNEL._are_flat(torch.empty(3, 25, 8, 128), query[:, 5:30])
