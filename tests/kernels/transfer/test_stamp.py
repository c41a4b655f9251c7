"""stamp: later work has later times, in nanoseconds."""

import time

import torch

from headway.kernels import stamp

PAUSE_SECONDS = 0.05
LONG_SECONDS = 5.0


def test_times_rise_by_what_passed(device: torch.device) -> None:
    stamps = torch.zeros(3, dtype=torch.int64, device=device)
    stamp(stamps[:1])
    if device.type == "cuda":
        torch.cuda.synchronize()
    time.sleep(PAUSE_SECONDS)
    stamp(stamps[1:2])
    first, second, untouched = stamps.tolist()
    assert PAUSE_SECONDS * 1e9 * 0.9 <= second - first < LONG_SECONDS * 1e9
    assert untouched == 0


def test_two_times_may_be_one(device: torch.device) -> None:
    stamps = torch.zeros(4, dtype=torch.int64, device=device)
    stamp(stamps[1:3])
    before, first, second, behind = stamps.tolist()
    assert first == second > before == behind == 0
