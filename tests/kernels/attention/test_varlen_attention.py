"""varlen_attention against prefill_attention, chunk by chunk, and that nothing else is written or read."""

import sys

import pytest
import torch

from headway.kernels import ScoreRule, prefill_attention, varlen_attention
from headway.kernels.attention.dispatch import prompt_tile

ALONE = sys.modules["headway.kernels.attention.prefill_attention"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
GUARD = 1e4


class Prompts:
    """Chunks (length, start) in shuffled blocks, unused entries -1; NaN in blocks that no chunk has, `behind`
    behind a chunk's end."""

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        device: torch.device,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        padding: int = 7,
        behind: float = GUARD,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(map(sum, chunks)))
        q_heads, kv_heads = heads
        lengths, starts = ([chunk[i] for chunk in chunks] for i in (0, 1))
        blocks = max(-(-(length + start) // block_size) for length, start in chunks) + 1
        table = torch.randperm(len(chunks) * blocks, generator=generator).view(len(chunks), blocks)
        shape = 2, len(chunks) * blocks, block_size, kv_heads, head_dim
        caches = torch.full(shape, torch.nan, dtype=dtype)
        for row, (length, start) in enumerate(chunks):
            if length == 0:
                table[row] = -1
                continue
            used = -(-(length + start) // block_size)
            caches[:, table[row, :used]] = behind
            for place in range(length + start):
                cell = table[row, place // block_size], place % block_size
                caches[:, *cell] = torch.randn(2, kv_heads, head_dim, generator=generator).to(dtype)
            table[row, used:] = -1
        self.chunks, self.scale = chunks, head_dim**-0.5
        self.keys, self.values = caches.to(device)
        self.table = table.to(device)
        self.lengths, self.starts = (torch.tensor(part, device=device) for part in (lengths, starts))
        self.firsts = torch.tensor([sum(lengths[:row]) for row in range(len(chunks))], device=device)
        tokens = sum(lengths) + padding
        self.query = torch.randn(tokens, q_heads, head_dim, generator=generator).to(device, dtype)
        self.query[sum(lengths) :] = torch.nan  # padding

    def rule(self, soft_cap: float = 0.0, first_position: int = 0, window: int = 0) -> ScoreRule:
        return ScoreRule(self.scale, soft_cap, first_position, window)

    def run(self, out: torch.Tensor | None = None, *, rule: ScoreRule | None = None) -> torch.Tensor:
        chunks = self.table, self.firsts, self.lengths, self.starts
        return varlen_attention(self.query, self.keys, self.values, *chunks, rule or self.rule(), out=out)

    def assert_each_is_as_alone(
        self, result: torch.Tensor, tolerance: float, *, rule: ScoreRule | None = None
    ) -> None:
        """Compares with the kernel of one prompt without TMA."""
        for row, (first, (length, _)) in enumerate(zip(self.firsts.tolist(), self.chunks, strict=True)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ALONE, "streams_attention", lambda *_: False)
                (expected,) = prefill_attention(
                    self.query[None, first : first + length], self.keys, self.values, self.table[row : row + 1],
                    self.starts[row : row + 1], rule or self.rule(),
                )  # fmt: skip
            torch.testing.assert_close(result[first : first + length], expected, rtol=0, atol=tolerance)

    def assert_padding_is_not_written(self, out: torch.Tensor) -> None:
        """That was full of GUARD."""
        assert bool((out[sum(length for length, _ in self.chunks) :] == GUARD).all()), "padding is written"


CASES = {
    "one": [(50, 0)],
    "single-tokens": [(1, 0), (1, 31), (1, 16)],
    "mixed": [(70, 0), (3, 60), (0, 0), (33, 5), (1, 0), (64, 16)],
    "many-short": [(3 + i % 4, 7 * i) for i in range(14)],
    "padding-chunks": [(20, 12), (0, 0), (0, 0)],
}


@pytest.mark.parametrize("chunks", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("block_size", "heads"), [(16, (4, 2)), (64, (4, 2)), (16, (6, 2)), (16, (4, 1)), (16, (16, 1))]
)
def test_each_chunk_gets_what_it_gets_alone(
    chunks: list[tuple[int, int]], block_size: int, heads: tuple[int, int], device: torch.device
) -> None:
    prompts = Prompts(chunks, device, heads=heads, block_size=block_size)
    out = torch.full_like(prompts.query, GUARD)
    assert prompts.run(out) is out
    prompts.assert_each_is_as_alone(out, 2e-6)
    prompts.assert_padding_is_not_written(out)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 8), (4, 16)), ((28, 4), (1, 64)), ((64, 8), (8, 8)), ((64, 4), (8, 8)), ((32, 32), (1, 64))],
)
def test_heads_that_share_keys_go_together_by_up_to_eight(
    heads: tuple[int, int], expected: tuple[int, int]
) -> None:
    """(heads, queries) of a program."""
    q_heads, kv_heads = heads
    tile = prompt_tile(q_heads // kv_heads, 128, 2, 232_448)
    assert (tile.heads, tile.queries) == expected


@pytest.mark.parametrize("first_position", [1, 30])
def test_keys_before_the_first_position_are_not_seen(first_position: int, device: torch.device) -> None:
    prompts = Prompts([(40, 0), (5, 60)], device, heads=(4, 2), block_size=16)
    rule = prompts.rule(first_position=first_position)
    prompts.assert_each_is_as_alone(prompts.run(rule=rule), 2e-6, rule=rule)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("soft_cap", "window"), [(0.0, 1), (0.0, 127), (0.0, 128), (20.0, 129), (0.0, 1024), (20.0, 0)]
)
def test_each_chunk_has_the_bits_that_it_has_alone_by_any_rule(
    soft_cap: float, window: int, head_dim: int
) -> None:
    """With TMA where the device has it, against the kernel of one prompt without."""
    chunks = [(300, 0), (128, 5000), (1, 77), (0, 0), (64, 64), (530, 2)]
    prompts = Prompts(
        chunks, torch.device("cuda"), heads=(16, 4), head_dim=head_dim, dtype=torch.bfloat16, padding=17
    )
    rule = prompts.rule(soft_cap, window=window)
    prompts.assert_each_is_as_alone(prompts.run(rule=rule), 0, rule=rule)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_types_and_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    chunks = [(300, 0), (128, 1000), (1, 77), (0, 0), (64, 64), (530, 2)]
    prompts = Prompts(chunks, torch.device("cuda"), heads=(16, 4), head_dim=head_dim, dtype=dtype, padding=17)
    prompts.assert_each_is_as_alone(prompts.run(), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(32, 8), (6, 2), (5, 1), (16, 1), (32, 32), (32, 16), (40, 8), (64, 8), (64, 4)], ids=str
)
@pytest.mark.parametrize(
    "chunks", [[(200, 3000)], [(512, 1500)], [(9, 40)] * 40, [(256, 0), (130, 700), (1, 9)]]
)
def test_few_and_many_rows_of_heads_that_share_keys(
    chunks: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    """As many as do go together where they are a power of two."""
    prompts = Prompts(chunks, torch.device("cuda"), heads=heads, head_dim=128, dtype=torch.bfloat16)
    out = torch.full_like(prompts.query, GUARD)
    prompts.run(out)
    prompts.assert_each_is_as_alone(out, TOLERANCE[torch.bfloat16])
    prompts.assert_padding_is_not_written(out)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "chunks",
    [
        [(512, 0)],
        [(512, 1025)],
        [(333, 700), (64, 63), (33, 31), (1, 0), (1, 63), (1, 64), (0, 0), (130, 62)],
        [(7, i) for i in range(60)],
        [(1000, 2000)],
    ],
    ids=["first", "later", "odd", "short", "long"],
)
def test_many_rows_see_nothing_behind_a_chunks_end_and_are_the_same_each_time(
    chunks: list[tuple[int, int]], head_dim: int, block_size: int
) -> None:
    prompts = Prompts(
        chunks, torch.device("cuda"), heads=(32, 8), head_dim=head_dim, block_size=block_size,
        dtype=torch.bfloat16, behind=torch.nan,
    )  # fmt: skip
    out = prompts.run(torch.full_like(prompts.query, GUARD))
    prompts.assert_each_is_as_alone(out, TOLERANCE[torch.bfloat16])
    prompts.assert_padding_is_not_written(out)
    prompts.table = prompts.table.int()
    for _ in range(50):
        assert torch.equal(prompts.run(torch.full_like(prompts.query, GUARD)), out)
