"""pick_tokens: a row's token is its own, whatever the rows that are sampled with it ask for."""

from __future__ import annotations

import pytest
import torch

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.sampling.sampler import in_target_vocabulary, pick_tokens
from headway.engine.scheduling.plan import TokenHistory
from headway.engine.state.masks import Masks
from headway.engine.state.processors import LogitsProcessorTable
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
    table = LogitsProcessorTable(num_rows, vocab_size, device)
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
    rows, table = rows_of(num_rows, device), LogitsProcessorTable(num_rows, vocab_size, device)
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


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_draft_vocabulary_is_picked_from_by_the_targets_ids(name: str) -> None:
    """In any order: with noise, filters, penalties, bias and masks as if the other tokens were forbidden."""
    torch.manual_seed(0)
    device, num_rows, vocab_size, num_drafted = torch.device(name), 8, 700, 100
    ids = torch.randperm(vocab_size)[:num_drafted].to(device)
    logits = torch.randn(num_rows, 1, vocab_size).to(device)
    table = LogitsProcessorTable(num_rows, vocab_size, device)
    banned = [int(ids[0]), int(ids[1])]
    for row in (1, 2):
        likely = int(logits[row, 0].argmax())
        sampling = SamplingParams(presence_penalty=2.0, logit_bias={likely: 9.0, int(ids[5]): 5.0})
        table.set_up(row, sampling, TokenHistory((3, 4), tuple(ids[6:20].tolist()), ()))
    rows = rows_of(num_rows, device).first(num_rows, table.first(num_rows))
    rows.temperatures[0] = 0
    rows.top_k[3] = 5
    entries = torch.full((num_rows,), -1, device=device)
    entries[4:6] = 0
    allowed = torch.full((1, 1, -(-vocab_size // 32)), -1, dtype=torch.int32)
    for token in banned:
        allowed[0, 0, token // 32] ^= 1 << (token % 32) if token % 32 < 31 else -(1 << 31)
    masks = Masks(entries, allowed.to(device))
    logits[4:6, 0, ids[0]] = 50.0  # which the masks forbid
    positions = torch.arange(num_rows, device=device) + 9
    no_window = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)

    def pick(given: torch.Tensor) -> torch.Tensor:
        return pick_tokens(given, rows, positions, no_window, masks=masks)[:, 0]

    is_drafted = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, ids, True)
    found = pick(in_target_vocabulary(logits[:, :, ids], ids, vocab_size))
    assert torch.equal(found, pick(logits.masked_fill(~is_drafted, -torch.inf)))
    assert is_drafted[found].all()
    assert not set(found[4:6].tolist()) & set(banned)
    whole = torch.randperm(vocab_size).to(device)
    assert torch.equal(
        pick(in_target_vocabulary(logits[:, :, whole], whole, vocab_size)), pick(logits.clone())
    )


def test_a_draft_of_a_smaller_vocabulary_is_the_targets_token_where_it_has_that() -> None:
    """Where it agrees with the target about the tokens that it has: the noise is that of the target's
    ids."""
    torch.manual_seed(0)
    num_rows, vocab_size, device = 4000, 64, torch.device("cpu")
    ids = torch.randperm(vocab_size)[:48]
    logits = torch.randn(1, 1, vocab_size).expand(num_rows, -1, -1)
    rows = RowTensors.allocate(num_rows, max_blocks=1, max_pending=1, device=device)
    rows.temperatures.fill_(1.0)
    rows.seeds.copy_(torch.arange(num_rows))
    positions, no_window = torch.arange(num_rows) % 50, torch.zeros(num_rows, 0, dtype=torch.int64)
    target = pick_tokens(logits.contiguous(), rows, positions, no_window)[:, 0]
    spread = in_target_vocabulary(logits[:, :, ids], ids, vocab_size)
    draft = pick_tokens(spread, rows, positions, no_window)[:, 0]
    has = (target[:, None] == ids).any(1)
    assert torch.equal(draft[has], target[has])
    assert 0.5 < has.float().mean() < 0.95
