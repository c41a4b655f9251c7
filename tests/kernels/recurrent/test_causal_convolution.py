"""The convolution gives what transformers gives, from any state on, in windows and in chunks, bit by bit the
same in both."""

from __future__ import annotations

import pytest
import torch
from headway_testing.delta_nets import convolved, spans_of

from headway.kernels import convolve_chunks, convolve_windows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CHANNELS = [5, 96, 260]


def inputs_of(
    count: int, channels: int, taps: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs that are part of a wider tensor, and a weight."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(count, channels + 3, generator=generator).to(device, dtype)[:, :channels]
    return x, torch.randn(channels, 1, taps, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("channels", CHANNELS)
def test_chunks_give_what_transformers_gives(
    channels: int, taps: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Two texts, chunk by chunk, among tokens of none."""
    x, weight = inputs_of(20, channels, taps, device, dtype)
    states = torch.zeros(3, channels, taps - 1, device=device, dtype=dtype)
    ids = torch.tensor([2, 0, 1], device=device)
    texts = {0: x[:9], 2: x[9:18]}
    found = {row: [] for row in texts}
    first = dict.fromkeys(texts, 0)
    for lengths in ((2, 5), (1, 1), (6, 3)):
        parts = [texts[row][first[row] : first[row] + n] for row, n in zip(texts, lengths, strict=True)]
        flat = torch.cat([x[18:19], *parts, x[19:]])
        spans = [(0, 1, lengths[0], False), (2, 1 + lengths[0], lengths[1], True), (0, 0, 0, False)]
        out = convolve_chunks(flat, weight, states, ids, spans_of(spans, device))
        for row, start, length, _ in spans[:2]:
            found[row].append(out[start : start + length])
            first[row] += length
    for row, text in texts.items():
        wanted = convolved(text.cpu(), weight.cpu())
        tolerance = TOLERANCE[dtype]
        result = torch.cat(found[row]).float().cpu()
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(states[ids[row]], text[len(text) - taps + 1 :].T)
    assert not states[ids[1]].any()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("taps", [2, 4])
def test_windows_have_the_bits_of_chunks(taps: int, width: int, device: torch.device) -> None:
    channels, rows = 96, 3
    x, weight = inputs_of(rows * width, channels, taps, device)
    states = torch.randn(4, channels, taps - 1, generator=torch.Generator().manual_seed(0)).to(device)
    before, windows = states.clone(), torch.full((4, 6, channels, taps - 1), 9.0, device=device)
    ids = torch.tensor([3, 0, 2], device=device)
    out = convolve_windows(x, weight, states, windows, ids)
    assert torch.equal(states, before)
    for row in range(rows):
        for count in range(1, width + 1):
            after, tokens = before.clone(), slice(row * width, row * width + count)
            chunk = convolve_chunks(x[tokens], weight, after, ids, spans_of([(row, 0, count, False)], device))
            assert torch.equal(chunk, out[tokens])
            assert torch.equal(windows[ids[row], count - 1], after[ids[row]])
    assert (windows[1] == 9).all()
    assert (windows[:, width:] == 9).all()


def test_no_rows(device: torch.device) -> None:
    x, weight = inputs_of(0, 4, 4, device)
    states, windows = torch.zeros(1, 4, 3, device=device), torch.zeros(1, 2, 4, 3, device=device)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    assert convolve_windows(x, weight, states, windows, ids).shape == (0, 4)
