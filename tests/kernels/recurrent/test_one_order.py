"""On a GPU, with heads of real sizes: no bit of a token depends on windows, cuts, company or checkpoints, and
no number of them compiles another kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from headway_testing.delta_nets import (
    PIECE_SIZE,
    TAPS,
    Sizes,
    empty_state,
    rule_of,
    run_chunks,
    run_windows,
    spans_of,
    tokens_of,
)

from headway.kernels import (
    DeltaRule,
    DeltaState,
    convolve_chunks,
    convolve_windows,
    gated_rms_norm,
    reference,
)

pytestmark = pytest.mark.gpu

SIZES = [Sizes(16, 16, 128, 128), Sizes(16, 48, 128, 128), Sizes(2, 6, 16, 12)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
NUM_TOKENS = 60


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda")


def on_cpu(rule: DeltaRule) -> DeltaRule:
    return rule._replace(decay_log=rule.decay_log.cpu(), decay_bias=rule.decay_bias.cpu())


def started(sizes: Sizes, entries: int, width: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
    """States of random numbers."""
    state = empty_state(sizes, entries, width, device, dtype)
    state.states.copy_(0.1 * torch.randn(state.states.shape, generator=torch.Generator().manual_seed(5)))
    return state


def written_in_windows(
    width: int, max_width: int, rows: int, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of NUM_TOKENS tokens of each row, all of which stay, and the states after all but
    the last window."""
    rule = rule_of(sizes, device)
    texts = [tokens_of(sizes, NUM_TOKENS, device, dtype, seed=row) for row in range(rows)]
    state, found = started(sizes, rows + 1, max_width, dtype, device), []
    ids = list(range(rows, 0, -1))
    for first in range(0, NUM_TOKENS, width):
        mixed, gates = (torch.cat([text[i][first : first + width] for text in texts]) for i in range(2))
        found.append(run_windows(mixed, gates, rule, state, ids).unflatten(0, (rows, width)))
        state.counts[1:] = width
    run_windows(mixed, gates, rule, state, ids)
    return torch.cat(found, 1), state.states[ids]


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_have_the_bits_of_one_token_after_the_other(
    rows: int, sizes: Sizes, dtype: torch.dtype, gpu: torch.device
) -> None:
    wanted = written_in_windows(1, 1, rows, sizes, dtype, gpu)
    for width in (2, 3, 4, 5):
        found = written_in_windows(width, 5, rows, sizes, dtype, gpu)
        assert torch.equal(found[0], wanted[0]), width
        assert torch.equal(found[1], wanted[1]), width


def test_chunks_of_generated_tokens_have_the_bits_of_windows(
    sizes: Sizes, dtype: torch.dtype, gpu: torch.device
) -> None:
    rule = rule_of(sizes, gpu)
    wanted, states = written_in_windows(4, 4, 1, sizes, dtype, gpu)
    mixed, gates = tokens_of(sizes, NUM_TOKENS, gpu, dtype, seed=0)
    for bounds in ((0, NUM_TOKENS), (0, 1, 17, NUM_TOKENS)):
        own = started(sizes, 2, 1, dtype, gpu).states
        parts = [
            run_chunks(mixed[a:b], gates[a:b], rule, own, [(1, 0, b - a, True)]) for a, b in pairwise(bounds)
        ]
        assert torch.equal(torch.cat(parts), wanted[0])
        assert torch.equal(own[1], states[0])


def test_prompts_have_the_same_bits_whole_cut_and_among_others(
    sizes: Sizes, dtype: torch.dtype, gpu: torch.device
) -> None:
    """States at all cuts, too, from which checkpoints are made."""
    rule, length = rule_of(sizes, gpu), 300
    mixed, gates = tokens_of(sizes, length, gpu, dtype)
    whole = started(sizes, 4, 1, dtype, gpu).states
    begin = whole[1].clone()
    wanted = run_chunks(mixed, gates, rule, whole, [(1, 0, length, False)])
    saved = {}
    for cuts in ((64,), (128, 256), (64, 128, 192, 256)):
        own, parts = started(sizes, 4, 1, dtype, gpu).states, []
        for a, b in pairwise((0, *cuts, length)):
            parts.append(run_chunks(mixed[a:b], gates[a:b], rule, own, [(1, 0, b - a, False)]))
            assert torch.equal(saved.setdefault(b, own[1].clone()), own[1]), f"the state after {b} tokens"
        assert torch.equal(torch.cat(parts), wanted), cuts
        assert torch.equal(own[1], whole[1]), cuts
    for before, after in ((1, 0), (70, 9), (200, 250)):
        # Of the same strides, of which Triton compiles by their divisors.
        count = before + length + after
        flat, flat_gates = tokens_of(sizes, count, gpu, dtype, seed=9)
        flat[before : before + length], flat_gates[before : before + length] = mixed, gates
        own = started(sizes, 4, 1, dtype, gpu).states
        own[3] = begin
        spans = [(0, 0, before, before == 70), (2, before, length, False), (3, before + length, after, False)]
        out = run_chunks(flat, flat_gates, rule, own, [*spans, (0, 0, 0, False)], [1, 0, 3, 2])
        assert torch.equal(out[before : before + length], wanted), (before, after)
        assert torch.equal(own[3], whole[1]), (before, after)


def test_kernels_give_what_the_twins_give(sizes: Sizes, dtype: torch.dtype, gpu: torch.device) -> None:
    rule, length, tolerance = rule_of(sizes, gpu), 200, TOLERANCE[dtype]
    mixed, gates = tokens_of(sizes, length, gpu, dtype)
    for is_generated in (False, True):
        own = started(sizes, 2, 1, dtype, gpu).states
        twin = own.cpu().clone()
        out = run_chunks(mixed, gates, rule, own, [(1, 0, length, is_generated)])
        wanted = torch.zeros(out.shape, dtype=torch.float32)
        reference.delta_chunks(
            mixed.cpu().float(), gates.cpu().float(), on_cpu(rule), twin, torch.arange(2),
            spans_of([(1, 0, length, is_generated)], torch.device("cpu")), wanted, piece_size=PIECE_SIZE,
        )  # fmt: skip
        torch.testing.assert_close(out.cpu().float(), wanted, rtol=tolerance, atol=tolerance)
        # States of steps are in float32 whatever the inputs are; products of pieces round to bfloat16.
        exact = TOLERANCE[torch.float32] if is_generated else tolerance
        torch.testing.assert_close(own.cpu(), twin, rtol=exact, atol=exact)


def test_convolutions_have_the_same_bits_in_windows_and_chunks(
    sizes: Sizes, dtype: torch.dtype, gpu: torch.device
) -> None:
    count, channels = 40, sizes.channels
    x, _ = tokens_of(sizes, count, gpu, dtype)
    weight = torch.randn(channels, 1, TAPS, generator=torch.Generator().manual_seed(1)).to(gpu, dtype)
    ids = torch.tensor([1, 0], device=gpu)
    states = torch.zeros(2, channels, TAPS - 1, device=gpu, dtype=dtype)
    wanted = convolve_chunks(x, weight, states, ids, spans_of([(1, 0, count, False)], gpu))
    twin = reference.convolve_chunks(
        x.cpu(), weight.cpu(), torch.zeros(states.shape, dtype=dtype), ids.cpu(),
        spans_of([(1, 0, count, False)], torch.device("cpu")),
    )  # fmt: skip
    torch.testing.assert_close(wanted.cpu(), twin, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)
    for width in (1, 2, 4, 5):
        own, windows = torch.zeros_like(states), states.new_zeros(2, 5, channels, TAPS - 1)
        for first in range(0, count, width):
            out = convolve_windows(x[first : first + width], weight, own, windows, ids[1:])
            assert torch.equal(out, wanted[first : first + width]), (width, first)
            own[0] = windows[0, width - 1]
        assert torch.equal(own[0], states[0])


def test_gated_norms_have_the_same_bits_among_any_number(dtype: torch.dtype, gpu: torch.device) -> None:
    for heads, dim in ((48, 128), (16, 128), (6, 12)):
        generator = torch.Generator().manual_seed(0)
        x, gate = torch.randn(2, 300, heads, dim, generator=generator).to(gpu, dtype)
        weight = torch.randn(dim, generator=generator).to(gpu, dtype)
        wanted = gated_rms_norm(x, gate, weight, 1e-6)
        for count in (1, 2, 7, 64, 129):
            parts = zip(x.split(count), gate.split(count), strict=True)
            assert torch.equal(torch.cat([gated_rms_norm(a, b, weight, 1e-6) for a, b in parts]), wanted)


def test_no_depth_nor_number_of_prompts_compiles_another_kernel(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    sizes, dtype = Sizes(16, 16, 128, 128), torch.bfloat16
    rule = rule_of(sizes, gpu)
    wide = torch.randn(400, sizes.channels + 2 * sizes.value_heads, device=gpu).to(dtype)
    weight = torch.randn(sizes.channels, 1, TAPS, device=gpu).to(dtype)
    kept = torch.zeros(64, sizes.channels, TAPS - 1, device=gpu, dtype=dtype)

    def run(width: int, max_width: int, num_spans: int) -> None:
        x, gates = wide[:, : sizes.channels], wide[:, sizes.channels :]
        state = empty_state(sizes, 64, max_width, gpu, dtype)
        windows = kept.new_zeros(64, max_width, *kept.shape[1:])
        ids = torch.arange(64, device=gpu)
        mixed = convolve_windows(x[: 2 * width], weight, kept, windows, ids[:2])
        run_windows(mixed, gates[: 2 * width], rule, state, [0, 1])
        numbers = [(row, row * 3, 3, row % 2 == 1) for row in range(num_spans)]
        # Columns of one tensor, as a step has them.
        columns = torch.tensor([list(map(int, column)) for column in zip(*numbers, strict=True)], device=gpu)
        spans = spans_of(numbers, gpu)._replace(rows=columns[0], first_tokens=columns[1], lengths=columns[2])
        convolve_chunks(x[: 3 * num_spans], weight, kept, ids, spans)
        run_chunks(
            x[: 3 * num_spans].contiguous(), gates[: 3 * num_spans], rule, state.states, numbers, range(64)
        )

    run(4, 4, 3)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr) and None
    )
    for width, max_width in ((1, 1), (1, 4), (2, 4), (3, 3), (16, 16)):
        for num_spans in (1, 2, 16, 33, 64):
            run(width, max_width, num_spans)
    assert compiled == []
