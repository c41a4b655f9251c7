"""pick_tokens: a row's token is its own, whatever the rows that are sampled with it ask for."""

from __future__ import annotations

import pytest
import torch

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.sampling.sampler import pick_tokens
from headway.engine.scheduling.plan import TokenHistory
from headway.engine.state.masks import Masks
from headway.engine.state.processors import AdjustmentTable
from headway.engine.state.row_tensors import RowTensors

ADJUSTED = SamplingParams(temperature=0.8, presence_penalty=0.5, logit_bias={3: 2.0})


def rows_of(num_rows: int, device: torch.device) -> RowTensors:
    """Sampled rows, of which every second has top-p and every fourth min-p."""
    rows = RowTensors.allocate(num_rows, max_blocks=1, max_pending=1, device=device)
    rows.temperatures.fill_(0.8)
    rows.seeds.copy_(torch.arange(num_rows))
    rows.top_p[::2] = 0.9
    rows.min_p[::4] = 0.02
    return rows


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_without_processors_get_the_same_tokens_beside_one_with_some(
    dtype: torch.dtype, *, is_masked: bool
) -> None:
    check(8, 700, torch.device("cpu"), dtype, is_masked=is_masked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("adjusted", [(), (0,), (2,), (0, 1, 2)], ids=str)
def test_logits_that_are_kept_stay_raw_whichever_rows_have_processors_and_masks(
    adjusted: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Row 0 is masked. Processors are there without a row of these that uses any: another row of the engine
    does."""
    num_rows, vocab_size, device = 3, 64, torch.device("cpu")
    logits = torch.randn(num_rows, 1, vocab_size).to(dtype)
    table = AdjustmentTable(num_rows, vocab_size, device)
    for row in adjusted:
        table.set_up(row, ADJUSTED, TokenHistory((3, 4), (5,), ()))
    rows = rows_of(num_rows, device).first(num_rows, table.first(num_rows))
    allowed = torch.full((1, 1, vocab_size // 32), 7, dtype=torch.int32)
    masks = Masks(torch.tensor([0, -1, -1]), allowed)
    given, no_window = logits.clone(), torch.zeros(num_rows, 0, dtype=torch.int64)
    tokens = pick_tokens(given, rows, torch.arange(num_rows), no_window, masks=masks, keeps_logits=True)
    assert torch.equal(given, logits)
    assert tokens[0, 0] in (0, 1, 2, 32, 33, 34)


@pytest.mark.gpu
@pytest.mark.parametrize("is_masked", [False, True])
def test_probabilities_of_a_whole_vocabulary_have_one_order(*, is_masked: bool) -> None:
    check(64, 151_680, torch.device("cuda"), torch.bfloat16, is_masked=is_masked)


def check(
    num_rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype, *, is_masked: bool
) -> None:
    window = 3
    logits = (torch.randn(num_rows, window, vocab_size) * 2).to(device, dtype)
    rows, table = rows_of(num_rows, device), AdjustmentTable(num_rows, vocab_size, device)
    table.set_up(1, ADJUSTED, TokenHistory((3, 4), (5,), ()))
    masks = None
    if is_masked:
        entries = torch.full((num_rows,), -1, device=device)
        entries[:2] = 0
        allowed = torch.randint(0, 1 << 30, (1, window, -(-vocab_size // 32)), dtype=torch.int32)
        masks = Masks(entries, allowed.to(device))
    positions = torch.arange(num_rows, device=device) + 9
    drafts = torch.zeros(num_rows, window - 1, dtype=torch.int64, device=device)
    alone = pick_tokens(logits.clone(), rows, positions, drafts, masks=masks)
    broken = torch.empty(num_rows, window, dtype=torch.bool, device=device)
    beside = rows.first(num_rows, table.first(num_rows))
    found = pick_tokens(logits, beside, positions, drafts, masks=masks, keeps_logits=True, broken=broken)
    others = torch.arange(num_rows, device=device) != 1
    assert torch.equal(found[others], alone[others])
    assert not broken.any()
    assert logits.isfinite().all(), "logits that are kept were masked"
    processed = pick_tokens(logits.float(), beside, positions, drafts, masks=masks)
    assert torch.equal(found[1], processed[1])
