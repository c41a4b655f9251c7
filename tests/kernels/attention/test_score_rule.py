"""Sliding windows and soft caps in every form of attention, against Gemma 2's own attention in transformers;
tiles made small, so that windows begin at each border."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from headway.kernels import ScoreRule, paged_attention, prefill_attention, varlen_attention
from headway.kernels.attention import dispatch

TOLERANCE = 3e-6
BLOCK_SIZE, TILE = 16, 16
SCALE = 0.3


class Rows:
    """Rows of `width` queries each in shuffled blocks, in float32."""

    def __init__(
        self, starts: list[int], width: int, device: torch.device, heads: tuple[int, int] = (4, 2)
    ) -> None:
        generator = torch.Generator().manual_seed(sum(starts) + width)
        blocks = -(-(max(starts) + width) // BLOCK_SIZE)
        ids = torch.randperm(len(starts) * blocks, generator=generator).view(-1, blocks)
        shape = len(starts), blocks * BLOCK_SIZE, heads[1], 16
        self.keys, self.values = torch.randn(2, *shape, generator=generator)
        caches = torch.empty(2, len(starts) * blocks, BLOCK_SIZE, *shape[2:])
        caches[:, ids.flatten()] = torch.stack((self.keys, self.values)).view(2, -1, BLOCK_SIZE, *shape[2:])
        self.caches, self.table = caches.to(device), ids.int().to(device)
        self.starts = torch.tensor(starts, device=device)
        self.query = torch.randn(len(starts), width, heads[0], 16, generator=generator).to(device)

    def windows(self, rule: ScoreRule) -> torch.Tensor:
        return paged_attention(self.query, *self.caches, self.table, self.starts, rule)

    def prompts(self, rule: ScoreRule) -> torch.Tensor:
        return prefill_attention(self.query, *self.caches, self.table, self.starts, rule)

    def chunks(self, rule: ScoreRule) -> torch.Tensor:
        width = torch.full_like(self.starts, self.query.shape[1])
        firsts = torch.arange(len(width), device=width.device) * width
        query = self.query.flatten(0, 1)
        out = varlen_attention(query, *self.caches, self.table, firsts, width, self.starts, rule)
        return out.view_as(self.query)

    def expected(self, rule: ScoreRule) -> torch.Tensor:
        """What transformers computes, row by row."""
        group = self.query.shape[2] // self.keys.shape[2]
        sees = sliding_window_causal_mask_function(rule.window) if rule.window else causal_mask_function
        results = []
        for query, keys, values, start in zip(
            self.query.cpu(), self.keys, self.values, self.starts.tolist(), strict=True
        ):
            position = (start + torch.arange(len(query)))[:, None]
            mask = torch.where(sees(0, 0, position, torch.arange(len(keys))), 0.0, -torch.inf)
            heads = [part.transpose(0, 1)[None] for part in (query, keys, values)]
            module = SimpleNamespace(num_key_value_groups=group, training=False)
            result, _ = eager_attention_forward(
                module, *heads, mask, scaling=SCALE, softcap=rule.soft_cap or None
            )
            results.append(result[0])
        return torch.stack(results)


FORMS: dict[str, Callable[[Rows, ScoreRule], torch.Tensor]] = {
    "windows": Rows.windows, "prompts": Rows.prompts, "chunks": Rows.chunks,
}  # fmt: skip
# Rows' starts, and queries of each: the first tile, drafts across the border of a window, of a tile, of a
# group; a prompt.
SHAPES = {"first": ([0, 3], 4), "drafts": ([14, 61, 127, 250], 5), "prompt": ([0, 37], 70)}
WINDOWS = (1, TILE - 1, TILE, TILE + 1, 3 * TILE, 1000)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 keys, quads of 32, groups of 64."""
    monkeypatch.setattr(dispatch, "_WIDE_TYPE_TILE", TILE)
    monkeypatch.setattr(dispatch, "QUAD_TILES", 2)
    monkeypatch.setattr(dispatch, "GROUP_TILES", 4)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, *WINDOWS])
@pytest.mark.parametrize(("starts", "width"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_transformers(
    form: str, starts: list[int], width: int, window: int, soft_cap: float, device: torch.device
) -> None:
    rows = Rows(starts, width, device)
    rule = ScoreRule(SCALE, soft_cap, window=window)
    torch.testing.assert_close(FORMS[form](rows, rule).cpu(), rows.expected(rule), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_tiles_before_the_windows_are_not_read(form: str, device: torch.device, is_interpreted: bool) -> None:
    """Not a number stands in every tile that no query of a row sees. The twin skips sums of 512 keys that no
    row sees."""
    is_twin = device.type == "cpu" and not is_interpreted
    tile = 512 if is_twin else TILE
    rows, rule = Rows([tile + 30, 5 * tile + 15], 4, device), ScoreRule(SCALE, window=17)
    expected = FORMS[form](rows, rule)
    starts = rows.starts if form == "chunks" or not is_twin else rows.starts.amin().expand(2)
    for start, table in zip(starts.tolist(), rows.table, strict=True):
        first_tile = (start - rule.window + 1) // tile
        assert first_tile > 0
        rows.caches[:, table[: first_tile * tile // BLOCK_SIZE].long()] = torch.nan
    assert torch.equal(FORMS[form](rows, rule), expected)
