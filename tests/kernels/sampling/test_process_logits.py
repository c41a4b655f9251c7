"""process_logits against a token-by-token statement of its rules, in plain Python."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch

from headway.kernels import LogitsProcessorState, count_tokens, process_logits
from headway.kernels.reference.sampling.process_logits import process_logits as process_logits_twin

VOCAB, STOPS, WORDS, LENGTH = 13, 3, 4, 4
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 1e-5}


@dataclass
class Row:
    """One request as its rules see it."""

    prompt: list[int]
    output: list[int]
    drafts: list[int]
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    min_tokens: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    forced: tuple[int, int] | None = None  # a number of tokens and what follows them
    after: int = -1  # a token that must be before it

    def expected(self, logits: list[float], num_drafts: int) -> list[float]:
        output = self.output + self.drafts[:num_drafts]
        text = self.prompt + output
        is_due = self.forced is not None and len(output) == self.forced[0] and self.forced[1] not in output
        if self.forced is not None and is_due and self.after in (-1, *output):
            return [0.0 if token == self.forced[1] else -math.inf for token in range(len(logits))]
        values = []
        for token, logit in enumerate(logits):
            value = logit
            if token in text:
                value = value / self.repetition if value > 0 else value * self.repetition
            if token in output:
                value -= output.count(token) * self.frequency + self.presence
            value += self.bias.get(token, 0.0)
            is_early = token in self.stops and len(output) < self.min_tokens
            ends_bad_word = any(
                words[-1] == token and text[len(text) - len(words) + 1 :] == words[:-1]
                for words in self.bad_words
                if len(text) >= len(words) - 1
            )
            values.append(-math.inf if is_early or ends_bad_word else value)
        return values


def processors(rows: list[Row | None], device: torch.device) -> LogitsProcessorState:
    """A row of None is not used and holds rubbish."""
    num = len(rows)
    counts = torch.full((num, VOCAB), 77, dtype=torch.int32)
    table = LogitsProcessorState(
        is_used=torch.tensor([row is not None for row in rows], dtype=torch.bool),
        penalties=torch.full((num, 3), math.nan),
        token_counts=counts,
        is_in_prompt=torch.ones(num, VOCAB, dtype=torch.bool),
        logit_bias=torch.full((num, VOCAB), math.nan),
        stop_token_ids=torch.full((num, STOPS), 2),
        min_positions=torch.full((num,), 1 << 40),
        bad_words=torch.full((num, WORDS, LENGTH), 3),
        recent_tokens=torch.full((num, LENGTH - 1), 3),
        forced_positions=torch.zeros(num, dtype=torch.int64),
        forced_token_ids=torch.full((num,), VOCAB - 1),
        forced_after_ids=torch.full((num,), VOCAB - 1),
    )
    for index, row in enumerate(rows):
        if row is not None:
            fill(table, index, row)
    return LogitsProcessorState(**{name: tensor.to(device) for name, tensor in table.tensors().items()})


def fill(table: LogitsProcessorState, index: int, row: Row) -> None:
    table.penalties[index] = torch.tensor([row.repetition, row.frequency, row.presence])
    table.token_counts[index] = torch.tensor([row.output.count(token) for token in range(VOCAB)])
    table.is_in_prompt[index] = torch.tensor([token in row.prompt for token in range(VOCAB)])
    table.logit_bias[index] = torch.tensor([row.bias.get(token, 0.0) for token in range(VOCAB)])
    table.stop_token_ids[index] = torch.tensor(row.stops + [-1] * (STOPS - len(row.stops)))
    table.min_positions[index] = len(row.prompt) + row.min_tokens
    lines = [[-1] * (LENGTH - len(words)) + words for words in row.bad_words]
    lines += [[-1] * LENGTH] * (WORDS - len(lines))
    table.bad_words[index] = torch.tensor(lines)
    recent = [-1] * LENGTH + row.prompt + row.output
    table.recent_tokens[index] = torch.tensor(recent[-(LENGTH - 1) :])
    num_tokens, token_id = row.forced or (-1 - len(row.prompt), 0)
    table.forced_positions[index] = len(row.prompt) + num_tokens
    table.forced_token_ids[index] = token_id
    table.forced_after_ids[index] = row.after


def positions(rows: list[Row | None], num_counted: int) -> torch.Tensor:
    return torch.tensor([0 if r is None else len(r.prompt + r.output) + num_counted for r in rows])


def check(
    rows: list[Row | None],
    window: int,
    num_drafts: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(len(rows), window, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    drafts = torch.tensor([[VOCAB + 5] * num_drafts if r is None else r.drafts for r in rows])
    drafts = drafts.view(len(rows), num_drafts).to(torch.int64)
    first = num_drafts - window + 1
    given = logits.to(device)
    result = process_logits(
        given, drafts.to(device), positions(rows, first).to(device), processors(rows, device)
    )
    assert torch.equal(given.cpu(), logits), "the logits were written to"
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, lines, raw in zip(rows, result.tolist(), logits.tolist(), strict=True):
        for place in range(window):
            wanted = raw[place] if row is None else row.expected(raw[place], first + place)
            assert lines[place] == pytest.approx(wanted, abs=TOLERANCES[dtype])


def random_row(chance: random.Random, num_drafts: int) -> Row:
    def tokens(most: int, least: int = 0) -> list[int]:
        return [chance.randrange(4) for _ in range(chance.randint(least, most))]

    return Row(
        prompt=tokens(5, 1),
        output=tokens(6),
        drafts=[chance.randrange(4) for _ in range(num_drafts)],
        repetition=chance.choice([1.0, 0.5, 1.7]),
        frequency=chance.choice([0.0, 0.7, -1.1]),
        presence=chance.choice([0.0, 1.3, -0.4]),
        bias={chance.randrange(VOCAB): chance.choice([5.0, -100.0, -math.inf]) for _ in range(chance.randrange(3))},
        stops=[chance.randrange(5) for _ in range(chance.randint(0, STOPS))],
        min_tokens=chance.randint(0, 10),
        bad_words=[tokens(LENGTH, 1) for _ in range(chance.randint(0, WORDS))],
        forced=chance.choice([None, (chance.randint(0, 9), chance.randrange(7))]), after=chance.choice([-1, chance.randrange(7)]),
    )  # fmt: skip


ALONE: dict[str, dict[str, object]] = {
    "nothing": {},
    "repetition": {"repetition": 1.5},
    "frequency": {"frequency": 0.3},
    "presence": {"presence": -0.8},
    "bias": {"bias": {1: 2.5, 4: -3.0}},
    "never allowed": {"bias": {1: -math.inf, 9: -math.inf}},
    "stops": {"stops": [1, 6], "min_tokens": 4},
    "stops whose time has come": {"stops": [1, 6], "min_tokens": 1},
    "one bad token": {"bad_words": [[2]]},
    "bad words across prompt, output and drafts": {"bad_words": [[5, 1, 1, 2], [1, 2, 1], [2, 1, 7], [1, 1]]},
    "a bad word longer than the text": {"bad_words": [[1, 5, 1, 1]]},
    "a token forced at the first place": {"forced": (2, 12)},
    "a token forced at a later place": {"forced": (3, 12)},
    "a token forced that is masked": {"forced": (2, 12), "bias": {12: -math.inf}, "bad_words": [[12]]},
    "a token forced before the window": {"forced": (1, 12)},
    "a token forced that the output has": {"forced": (3, 1)},
    "a token forced that the window has": {"forced": (4, 2)},
    "a token forced that the prompt has": {"forced": (2, 5)},
    "a token forced after one of the output": {"forced": (3, 12), "after": 1},
    "a token forced after one of the window": {"forced": (4, 12), "after": 2},
    "a token not forced without the one before it": {"forced": (3, 12), "after": 5},
    "all": {
        "repetition": 0.7, "frequency": 0.2, "presence": 0.4, "bias": {3: 1.0}, "stops": [0], "min_tokens": 9,
        "bad_words": [[1, 2]],
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", ALONE)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_each_rule_counts_the_window_before_each_place(rule: str, window: int, device: torch.device) -> None:
    row = Row([5], [1, 1], [2, 1, 2][: window - 1], **ALONE[rule])  # type: ignore[arg-type]
    check([row], window, window - 1, device)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a_single_place_counts_all_that_was_drafted(num_drafts: int, device: torch.device) -> None:
    row = Row([5], [1, 1], [2, 1, 2][:num_drafts], 1.5, 0.3, 0.1, bad_words=[[2, 1], [1, 2]], stops=[4], min_tokens=4)  # fmt: skip
    check([row], 1, num_drafts, device)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (4, torch.float64), (4, torch.float32), (9, torch.bfloat16)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_random_batches_with_rows_that_use_nothing(
    window: int, dtype: torch.dtype, device: torch.device
) -> None:
    chance = random.Random(window)
    for seed in range(8):
        rows = [random_row(chance, window - 1) if chance.random() < 0.7 else None for _ in range(seed)]
        check(rows, window, window - 1, device, dtype, seed)


def test_rows_that_use_nothing_get_their_logits_bit_by_bit(device: torch.device) -> None:
    logits = torch.randn(3, 2, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    table = processors([None, Row([1], [2], [3], 1.3), None], device)
    drafts = torch.tensor([[99], [3], [-4]], device=device)
    result = process_logits(logits, drafts, torch.tensor([0, 2, 0], device=device), table)
    assert torch.equal(result[[0, 2]], logits[[0, 2]])
    assert not torch.equal(result[1], logits[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_vocabulary_of_several_programs_is_adjusted_as_by_the_twin(
    window: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit by bit, whatever the strides of the window's tokens."""
    generator = torch.Generator().manual_seed(window)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, vocab, stops, words, length, drafted = 5, 2500, 5, 3, 4, 3
    table = LogitsProcessorState(
        is_used=torch.tensor([True, False, True, True, False]),
        penalties=floats(rows, 3).abs() + 0.3,
        token_counts=ints(-3, 3, rows, vocab).clamp(min=0).to(torch.int32),
        is_in_prompt=ints(0, 2, rows, vocab).to(torch.bool),
        logit_bias=floats(rows, vocab),
        stop_token_ids=ints(-1, vocab, rows, stops),
        min_positions=ints(8, 12, rows),
        bad_words=ints(-1, 3, rows, words, length),
        recent_tokens=ints(0, 3, rows, length - 1),
        forced_positions=torch.tensor([9, 9, 10, -1, 9]),
        forced_token_ids=torch.tensor([2499, 0, 1300, 7, 0]),
        forced_after_ids=torch.tensor([-1, 1, 2499, -1, 2]),
    )
    logits = floats(rows, window, vocab).to(dtype)
    tokens = ints(0, 3, drafted, rows).T
    where = torch.full((rows,), 9)
    expected = process_logits_twin(logits, tokens, where, table)
    on_device = LogitsProcessorState(**{name: tensor.to(device) for name, tensor in table.tensors().items()})
    result = process_logits(logits.to(device), tokens.T.to(device).T, where.to(device), on_device)
    assert result.dtype == torch.float32
    assert torch.equal(result.cpu(), expected)
    assert torch.isinf(expected).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_no_rule_hides_a_logit_that_is_nan_or_inf(value: float, device: torch.device) -> None:
    """Token 1 is masked, penalised or lowered in each row; sampling finds the line by its highest logit."""
    rows: list[Row | None] = [
        Row([3], [1], [], stops=[1], min_tokens=5),
        Row([3], [3], [], bad_words=[[3, 1]]),
        Row([3], [1], [], bias={1: -math.inf}),
        Row([1], [1], [], repetition=1.5, frequency=2.0, presence=2.0),
        Row([3], [3], [], forced=(1, 4)),
        Row([3], [3], [], forced=(1, 1)),
        None,
    ]
    logits = torch.randn(len(rows), 1, VOCAB)
    logits[:, :, 1] = value
    where = positions(rows, 0).to(device)
    no_tokens = torch.zeros((len(rows), 0), dtype=torch.int64, device=device)
    result = process_logits(logits.to(device), no_tokens, where, processors(rows, device))
    assert not bool((result.amax(-1) < torch.inf).any())


def test_counted_tokens_are_output_from_then_on(device: torch.device) -> None:
    chance = random.Random(0)
    rows: list[Row | None] = [random_row(chance, 3) for _ in range(6)] + [None]
    table = processors(rows, device)
    tokens = torch.tensor([[VOCAB] * 3 if r is None else r.drafts for r in rows], device=device)
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}
    counts = [0, 1, 2, 3, 2, 0, 3]
    count_tokens(tokens, torch.tensor(counts, device=device), table)
    for row, count in zip(rows, counts, strict=True):
        if row is not None:
            row.output += row.drafts[:count]
    expected = processors(rows, device)
    for name, tensor in table.tensors().items():
        assert torch.equal(tensor[:-1], expected.tensors()[name][:-1]) or name in ("penalties", "logit_bias")
        assert torch.equal(tensor[-1], before[name][-1]) or name in ("penalties", "logit_bias")


@pytest.mark.gpu
def test_a_cuda_graph_can_hold_both() -> None:
    device = torch.device("cuda")
    chance = random.Random(3)
    rows: list[Row | None] = [random_row(chance, 2) for _ in range(4)] + [None]
    table = processors(rows, device)
    logits = torch.randn(5, 3, VOCAB, device=device)
    drafts = torch.tensor([[0, 0] if r is None else r.drafts for r in rows], device=device)
    where, counts = positions(rows, 0).to(device), torch.zeros(5, dtype=torch.int64, device=device)
    expected = process_logits(logits, drafts, where, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = process_logits(logits, drafts, where, table)
        count_tokens(drafts, counts, table)
    graph.replay()
    assert torch.equal(captured, expected)
