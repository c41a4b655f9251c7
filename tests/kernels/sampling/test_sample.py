"""sample: noise from published vectors, filters against a token-by-token statement, shares against
chi-square."""

import math
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy import stats

from headway.kernels import gumbel_noise, reference, sample
from headway.kernels.reference.sampling._philox import philox_4x32

# tests/kat_vectors of Random123: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
LEAST_P_VALUE = 1e-4
EXEMPT_SHARE = 0.001  # of tokens next to the cut of top-p
MOST_GATHERED = 8192  # tokens; where filters keep more, the whole vocabulary is searched


def signed(low: int, high: int) -> int:
    value = high << 32 | low
    return value - 2**64 if value >= 2**63 else value


def pick(
    logits: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seeds: torch.Tensor | None = None,
    by: Callable[..., torch.Tensor] = sample,
) -> torch.Tensor:
    rows, device = logits.shape[0], logits.device

    def column(value: float | list[float], dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    return by(
        logits,
        torch.arange(rows, device=device) * 7 if positions is None else positions,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.arange(rows, device=device) + 11 if seeds is None else seeds,
    )


def noisy_argmax(
    row: torch.Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """One token, stated plainly in float64."""
    if temperature == 0:
        return int(row.argmax())
    scaled = row.double() / temperature
    kept = torch.ones_like(row, dtype=torch.bool)
    if top_k > 0:
        kept &= scaled >= scaled.sort(descending=True).values[min(top_k, row.numel()) - 1]
    probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    above = torch.tensor([float(probabilities[probabilities > p].sum()) for p in probabilities])
    if top_p < 1:
        kept &= above < max(top_p, 1e-30)
    kept &= probabilities >= min_p * probabilities.max()
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), row.numel())[0].double()
    return int((scaled + noise).masked_fill(~kept, -torch.inf).argmax())


@pytest.mark.parametrize("line", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_words(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter, key, answer = words[:4], words[4:6], words[6:]
    even, odd = philox_4x32(
        torch.tensor(counter[::2]).view(2, 1, 1),
        torch.tensor(counter[1::2]).view(2, 1, 1),
        torch.tensor(key).view(2, 1, 1),
    )
    assert [int(even[0]), int(odd[0]), int(even[1]), int(odd[1])] == answer


def test_the_counter_is_id_and_position_and_the_key_is_the_seed(device: torch.device) -> None:
    seed, position = signed(0xA4093822, 0xF99F31D0), signed(0x85A308D3, 0x93198A2E)
    noise = gumbel_noise(
        torch.tensor([seed], device=device), torch.tensor([position], device=device), 4 * 70 + 3
    )
    counter = torch.tensor([70, 0x93198A2E]).view(2, 1, 1), torch.tensor([0x85A308D3, 0]).view(2, 1, 1)
    even, odd = philox_4x32(*counter, torch.tensor([0xA4093822, 0xF99F31D0]).view(2, 1, 1))
    v = (torch.stack((even[0], odd[0], even[1])).double().flatten() + 0.5) / 2**32
    torch.testing.assert_close(noise[0, 280:].cpu().double(), -torch.log(-torch.log1p(-v)), rtol=0, atol=2e-6)


def test_noise_depends_on_nothing_else(device: torch.device) -> None:
    seeds, positions = torch.tensor([5, -3, 5], device=device), torch.tensor([9, 2**33, 10], device=device)
    together = gumbel_noise(seeds, positions, 1000)
    for row in range(3):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 517)
        assert torch.equal(alone[0], together[row, :517])
    assert not bool((together[0] == together[2]).any())


def test_noise_is_finite_and_gumbel(device: torch.device) -> None:
    noise = gumbel_noise(torch.tensor([1], device=device), torch.tensor([2], device=device), 200_000)
    assert bool(noise.isfinite().all())
    assert stats.kstest(noise[0].cpu().numpy(), stats.gumbel_r.cdf).pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_greedy_is_argmax_with_ties_to_the_lowest_id(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits[1, 2, [70, 3, 999]] = 50.0
    expected = logits.double().cpu().argmax(-1)
    tokens = pick(logits, temperature=0.0, top_k=3, top_p=0.5, min_p=0.3)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens.cpu(), expected)
    assert int(tokens[1, 2]) == 3


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_k": 1},
        {"top_k": 10_000},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {
            "temperature": [0.0, 1.0, 0.5, 2.0, 0.0, 1.0],
            "top_k": [3, 0, 7, 2, 0, 900],
            "top_p": [0.2, 0.8, 1.0, 0.5, 1.0, 0.3],
            "min_p": [0.0, 0.3, 0.0, 0.05, 0.0, 0.0],
        },
    ],
    ids=lambda f: " ".join(f"{k}={'mixed' if isinstance(v, list) else v}" for k, v in f.items()),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_are_the_noisy_argmax_of_the_kept_tokens(
    filters: dict[str, float | list[float]], dtype: torch.dtype, device: torch.device, is_interpreted: bool
) -> None:
    rows, window, vocab_size = 6, 1 if is_interpreted else 3, 301
    logits = torch.randn(rows, window, vocab_size, generator=torch.Generator().manual_seed(5)) * 2
    logits = (logits * 8).round() / 8  # ties everywhere
    parameters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    tokens = pick(logits.to(device, dtype), **parameters)
    columns = [v if isinstance(v, list) else [v] * rows for v in parameters.values()]
    expected = [
        [noisy_argmax(logits[r, w], r + 11, 7 * r + w, *(c[r] for c in columns)) for w in range(window)]
        for r in range(rows)
    ]
    assert tokens.tolist() == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_token_depends_neither_on_the_window_nor_on_other_rows(
    filters: dict[str, float], device: torch.device, is_interpreted: bool
) -> None:
    rows, window = (2, 2) if is_interpreted else (4, 5)
    logits = torch.randn(rows, window, 4200, generator=torch.Generator().manual_seed(1)).to(device) * 3
    positions, seeds = torch.arange(rows, device=device) * 100, torch.arange(rows, device=device)
    together = pick(logits, positions=positions, seeds=seeds, **filters)
    for row in range(rows):
        for place in range(window):
            alone = pick(
                logits[row : row + 1, place : place + 1],
                positions=positions[row : row + 1] + place,
                seeds=seeds[row : row + 1],
                **filters,
            )
            assert int(alone) == int(together[row, place])


def test_top_p_reaches_far_into_a_flat_distribution(device: torch.device, is_interpreted: bool) -> None:
    """All tokens tie or nearly: most of the vocabulary must be kept."""
    rows, vocab_size = (3, 4100) if is_interpreted else (400, 5000)
    logits = torch.linspace(0, 1e-3, vocab_size).expand(rows, 1, -1).contiguous().to(device)
    tokens = pick(logits, top_p=0.9).flatten()
    assert int(tokens.min()) >= vocab_size // 10 - 1
    assert is_interpreted or int(tokens.min()) < 600
    assert len(set(tokens.tolist())) > 0.9 * rows


def test_a_tiny_temperature_overflows_nothing(device: torch.device) -> None:
    logits = torch.tensor([[[30.0, 40.0, 39.0]]], device=device)
    assert pick(logits, temperature=1e-38, top_p=0.9).tolist() == [[1]]


def test_masked_tokens_are_never_picked(device: torch.device, is_interpreted: bool) -> None:
    logits = torch.full((6 if is_interpreted else 300, 1, 64), -torch.inf, device=device)
    logits[:, :, [5, 40]] = 0.0
    for filters in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert set(pick(logits, **filters).flatten().tolist()) == {5, 40}


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan], ids=str)
def test_a_line_without_a_single_number_gets_a_token_that_exists(
    filters: dict[str, float], value: float, device: torch.device
) -> None:
    token = int(pick(torch.full((1, 1, 5000), value, device=device), **filters))
    assert 0 <= token < 5000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_shares_over_100_000_draws(
    temperature: float, top_p: float, device: torch.device, is_interpreted: bool
) -> None:
    """Chi-square over consecutive seeds and positions at once."""
    draws = 8 if is_interpreted else 100_000
    logits = torch.tensor([1.2, -0.3, 0.4, 2.0, -4.0, 0.0, 1.1], device=device)
    window = 4
    rows = draws // window
    tokens = pick(logits.expand(rows, window, 7).contiguous(), temperature=temperature, top_p=top_p)
    shares = (logits.cpu().double() / temperature).softmax(-1)
    above = torch.tensor([float(shares[shares > p].sum()) for p in shares])
    shares = torch.where(above < top_p, shares, 0)
    shares /= shares.sum()
    counts = torch.bincount(tokens.flatten().cpu(), minlength=7).double()
    assert bool((counts[shares == 0] == 0).all())
    possible = shares > 0
    expected = shares[possible] * counts.sum()
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > LEAST_P_VALUE


@pytest.mark.interpreted_long
def test_rare_tokens_keep_their_share(device: torch.device, is_interpreted: bool) -> None:
    """4096 tokens of 1e-7 each beside one that holds the rest: noise of low precision would lose them."""
    rows = 24 if is_interpreted else 4000
    logits = torch.full((1, 1, 4097), 0.0, device=device)
    share = 0.1
    logits[0, 0, 0] = torch.tensor(4096 * (1 - share) / share).log()
    logits = logits.expand(rows, 1, 4097).contiguous()
    tokens = pick(logits)
    rare = int((tokens > 0).sum())
    if is_interpreted:  # few rows say little of shares
        assert rare > 0
        assert torch.equal(tokens, pick(logits, by=reference.sample))
    assert stats.binomtest(rare, rows, share).pvalue > LEAST_P_VALUE


def test_no_rows(device: torch.device) -> None:
    assert pick(torch.zeros(0, 3, 16, device=device)).shape == (0, 3)


def test_a_given_buffer_is_filled_and_returned(device: torch.device) -> None:
    logits = torch.zeros(2, 1, 8, device=device)
    logits[0, 0, 3] = logits[1, 0, 5] = 9.0
    buffer = torch.full((2, 1), -1, device=device)
    zeros, ones = torch.zeros(2, device=device), torch.ones(2, device=device)
    integers = torch.zeros(2, dtype=torch.int64, device=device)
    result = sample(logits, integers, zeros, integers, ones, zeros, integers, out=buffer)
    assert result is buffer
    assert buffer.tolist() == [[3], [5]]


def test_only_the_rows_that_are_asked_for_are_written(device: torch.device) -> None:
    logits = torch.full((4, 2, 300), -1.0, device=device)
    logits[:, 0, 3], logits[:, 1, 5] = 9.0, torch.nan
    tokens = torch.full((4, 2), -7, device=device)
    broken = torch.tensor([[True, False]] * 4, device=device)
    only = torch.tensor([True, False, False, True], device=device)
    index, temperatures = torch.arange(4, device=device), torch.tensor([0.0, 1.0, 0.0, 0.01], device=device)
    parameters = index, temperatures, index * 0, torch.ones_like(temperatures), temperatures * 0, index
    assert sample(logits, *parameters, out=tokens, broken=broken, only=only) is tokens
    assert tokens[:, 0].tolist() == [3, -7, -7, 3]
    assert tokens[1:3, 1].tolist() == [-7, -7]
    assert broken.tolist() == [[False, True], [True, False], [True, False], [False, True]]


def test_filtered_rows_get_the_noise_of_unfiltered_ones(device: torch.device, is_interpreted: bool) -> None:
    """With few tokens kept, the noise is made for these alone: it must be the same."""
    logits = torch.full((2 if is_interpreted else 50, 2, 4096), -5.0)
    kept = torch.arange(40) * 100 + 3
    logits[:, :, kept] = 0.0
    filtered = pick(logits.to(device), top_p=0.5)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, :, kept] = 0.0
    assert torch.equal(filtered, pick(masked.to(device)))


@pytest.mark.parametrize(
    "filters", [{"top_k": 9}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
)
def test_bfloat16_logits_are_filtered_as_their_float32_values(
    filters: dict[str, float], device: torch.device
) -> None:
    """Of both signs, with ties everywhere, a few within reach and many beyond."""
    generator = torch.Generator().manual_seed(9)
    for shift in (0.0, -40.0):
        logits = (torch.randn(3, 1, 4500, generator=generator) * 4 + shift).to(device, torch.bfloat16)
        assert torch.equal(pick(logits, **filters), pick(logits.float(), **filters))


def peak_over_thousands(device: torch.device, is_interpreted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 1, vocab] with token 7 far above others, which tie, are too many to gather and hold half of the
    mass; seeds.

    The two rows of the interpreter get token 7 and one beyond those that are gathered.
    """
    rows, vocab_size, first_seed = (2, 9000, 3) if is_interpreted else (6, 30_000, 11)
    logits = torch.full((rows, 1, vocab_size), -math.log(vocab_size), device=device)
    logits[:, :, 7] = 0.0
    return logits, torch.arange(rows, device=device) + first_seed


def test_top_p_reaches_past_a_gap_to_where_the_mass_is(device: torch.device, is_interpreted: bool) -> None:
    """One token stands far above thousands that tie and hold half of the mass: top-p keeps all."""
    logits, seeds = peak_over_thousands(device, is_interpreted)
    tokens = pick(logits, top_p=0.99, seeds=seeds)
    assert bool((tokens != 7).any())
    assert not is_interpreted or int(tokens.max()) >= MOST_GATHERED
    assert torch.equal(tokens, pick(logits, seeds=seeds))


def test_top_k_reaches_past_a_gap(device: torch.device, is_interpreted: bool) -> None:
    """The second of two tokens kept ties with thousands, far below the first: all of them are kept."""
    logits, seeds = peak_over_thousands(device, is_interpreted)
    tokens = pick(logits, top_k=2, seeds=seeds)
    assert bool((tokens != 7).any())
    assert not is_interpreted or int(tokens.max()) >= MOST_GATHERED
    assert torch.equal(tokens, pick(logits, seeds=seeds))


def logits_of(shape: str, vocab_size: int) -> torch.Tensor:
    """[vocab_size] float32."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(vocab_size, generator=generator)
    order = torch.rand(vocab_size, generator=generator).argsort()
    falling = -1.5 * torch.arange(1, vocab_size + 1).log()
    is_masked = torch.rand(vocab_size, generator=generator) < 0.9
    return {
        "peaked": falling[order],
        "crowded": falling,  # the first tokens fill one run
        "flat": noise,
        "masked": noise.masked_fill(is_masked, -torch.inf),
        "equal": torch.full((vocab_size,), 3.0),
        "tied": noise.round(),
    }[shape]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.9, 0.999999])
@pytest.mark.parametrize("shape", ["peaked", "crowded", "flat", "masked", "equal", "tied"])
def test_top_p_alone_gives_the_tokens_of_the_twin(
    shape: str, top_p: float, device: torch.device, is_interpreted: bool
) -> None:
    """Small shares of flat distributions reject one candidate after the other."""
    rows = 1 if is_interpreted else 50
    logits = logits_of(shape, 4500).expand(rows, 1, -1).contiguous().to(device)
    ones, whole = torch.ones(rows, device=device), torch.arange(rows, device=device)
    parameters = whole * 5, ones * 1.2, whole * 0, ones * top_p, ones * 0, whole + 20
    assert torch.equal(sample(logits, *parameters), reference.sample(logits, *parameters))


def test_all_that_tie_with_the_last_kept_are_kept(device: torch.device, is_interpreted: bool) -> None:
    """The first 3 of 33 tokens hold 0.5 already."""
    logits = torch.full((2 if is_interpreted else 50, 2, 4500), -torch.inf)
    logits[:, :, 1000:1030] = 0.0
    logits[:, :, [5, 2300, 4499]] = 2.5
    masked = logits.clone()
    assert torch.equal(pick(logits.to(device), top_p=0.6), pick(masked.to(device)))
    masked[:, :, 1000:1030] = -torch.inf
    assert torch.equal(pick(logits.to(device), top_p=0.5), pick(masked.to(device)))


def test_rows_of_every_kind_stand_side_by_side(device: torch.device) -> None:
    """Greedy, plain, top-k, top-p, min-p: each as it would be alone, and again in a second launch."""
    logits = torch.stack([logits_of(shape, 4500) for shape in ("flat", "tied", "flat", "flat", "peaked")])
    logits = logits[:, None].to(device)
    columns = {
        "temperature": [0.0, 0.8, 1.0, 1.3, 1.0],
        "top_k": [0, 0, 40, 0, 0],
        "top_p": [0.9, 1.0, 0.9, 0.7, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.02],
    }
    positions, seeds = torch.arange(5, device=device) * 3, torch.arange(5, device=device) + 1
    together = pick(logits, positions=positions, seeds=seeds, **columns)
    for row in range(5):
        own = {name: values[row : row + 1] for name, values in columns.items()}
        some = slice(row, row + 1)
        alone = pick(logits[some], positions=positions[some], seeds=seeds[some], **own)
        assert int(alone) == int(together[row])
    assert torch.equal(pick(logits, positions=positions, seeds=seeds, **columns), together)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_one_logit_that_is_no_number_does_no_harm(
    filters: dict[str, float], value: float, device: torch.device
) -> None:
    logits = logits_of("flat", 4500)[None, None].to(device)
    logits[0, 0, 77] = value
    assert 0 <= int(pick(logits, **filters)) < 4500


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5},
        pytest.param({"top_k": 2000, "top_p": 0.9}, marks=pytest.mark.interpreted_long),
    ],
    ids=str,
)  # fmt: skip
def test_lines_with_nan_or_inf_are_marked_and_others_get_the_same_token(
    filters: dict[str, float], dtype: torch.dtype, device: torch.device
) -> None:
    """One such logit in the first, a middle or the last place; -inf, even of all tokens, is no reason."""
    vocab_size, width = 2500, 4
    whole = logits_of("flat", vocab_size).to(device, dtype).expand(3, width, vocab_size).contiguous()
    logits = whole.clone()
    places = [(value, at) for value in (torch.nan, -torch.nan, torch.inf) for at in (0, 2100, vocab_size - 1)]
    for index, (value, at) in enumerate(places):
        logits[index // width, index % width, at] = value
    logits[2, 1] = -torch.inf
    logits[2, 2, :2000] = -torch.inf
    broken = torch.zeros(3, width, dtype=torch.bool, device=device)
    tokens = pick(logits, by=partial(sample, broken=broken), **filters)
    expected = torch.arange(3 * width).view(3, width) < len(places)
    assert torch.equal(broken.cpu(), expected)
    assert bool(((tokens >= 0) & (tokens < vocab_size)).all())
    logits[expected.to(device)] = whole[expected.to(device)]
    tokens_of_numbers = pick(logits, by=partial(sample, broken=broken), **filters)
    assert not bool(broken.any())
    assert torch.equal(tokens.cpu()[~expected], tokens_of_numbers.cpu()[~expected])


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99])
@pytest.mark.parametrize("shape", ["peaked", "flat"])
def test_a_token_is_the_same_whatever_the_number_of_lines(shape: str, top_p: float) -> None:
    """Many lines have one program each, few lines many; and a graph, replayed, finds its workspace as it
    was."""
    lines = logits_of(shape, 151_680)[torch.randint(0, 151_680, (80, 151_680))]
    logits = lines.to("cuda", torch.bfloat16).view(80, 1, -1).expand(80, 4, -1).contiguous()
    positions, seeds = torch.arange(80, device="cuda") * 9, torch.arange(80, device="cuda")
    together = pick(logits, positions=positions, seeds=seeds, top_p=top_p)
    ones, none = torch.ones(1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    for row in range(0, 80, 7):
        own = positions[row : row + 1], ones, none, ones * top_p, ones * 0, seeds[row : row + 1]
        some = logits[row : row + 1]
        assert torch.equal(sample(some, *own), together[row : row + 1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = sample(some, *own)
        for _ in range(3):
            replayed.zero_()
            graph.replay()
            assert torch.equal(replayed, together[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_peaked", [True, False], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.0), (3000, 0.99, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05)],
    ids=str,
)
def test_tokens_are_those_of_the_twin_over_a_whole_vocabulary(
    top_k: int, top_p: float, min_p: float, is_peaked: bool, dtype: torch.dtype
) -> None:
    """Probabilities that fall as rank ** -1.5, and a normal distribution of logits."""
    rows, window, vocab_size = 32, 4, 151_680
    logits = torch.randn(rows, window, vocab_size, device="cuda")
    if is_peaked:
        falling = -1.5 * torch.arange(1, vocab_size + 1, device="cuda").log()
        logits = falling[logits.argsort(-1)]
    ones, whole = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    parameters = whole, ones, whole * 0 + top_k, ones * top_p, ones * min_p, whole + 5
    tokens = sample(logits.to(dtype), *parameters)
    assert torch.equal(tokens, reference.sample(logits.to(dtype), *parameters))


@pytest.mark.gpu
@pytest.mark.timeout(100, method="thread")
@pytest.mark.parametrize("vocab_size", [4096, 32_000, 65_536])
def test_the_threads_of_a_line_agree_about_its_bound(vocab_size: int) -> None:
    """Of such a vocabulary one warp has all sums. Lines are shifted to where the first bound is about 0,
    which there are most float32 numbers around: threads that round a sum otherwise would search from far
    apart."""
    rows, window, num_lines, num_other = 256, 4, 0, 0
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    for _ in range(12):
        logits = torch.randn(rows, window, vocab_size, device="cuda", generator=generator)
        top_p = 0.05 + 0.94 * torch.rand(rows, device="cuda", generator=generator)
        seeds = torch.randint(0, 1 << 62, (rows,), device="cuda", generator=generator)
        highest = logits.amax(-1, keepdim=True)
        total = (logits - highest).exp().sum(-1, keepdim=True)
        least = (1 - top_p)[:, None, None] * total / vocab_size
        logits += (1e-3 - least.log()) / (1 - 1e-5) - highest
        ones, none = torch.ones(rows, device="cuda"), torch.zeros_like(seeds)
        parameters = seeds % 1000, ones, none, top_p, ones * 0, seeds
        tokens = sample(logits, *parameters)
        num_lines += tokens.numel()
        num_other += int((tokens != reference.sample(logits, *parameters)).sum())
    assert num_other <= EXEMPT_SHARE * num_lines


def test_the_pick_is_launched_without_fused_products(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[dict[str, object]] = []

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: launches.append(options)

    module = sys.modules["headway.kernels.sampling.sample"]
    monkeypatch.setattr(module, "takes_triton", lambda _: True)
    for kernel in ("_scan_kernel", "_pick_kernel"):
        monkeypatch.setattr(module, kernel, Noting())
    pick(torch.zeros(1, 1, 100))
    assert [options.get("enable_fp_fusion") for options in launches] == [None, False]
