"""A fall of the acceptance of first drafts is told once, and noise, idle times and low acceptance from the
start never are."""

from __future__ import annotations

import logging

import numpy
import pytest

from headway.server.telemetry.acceptance_watch import (
    FIRST_WINDOWS,
    LONG_WINDOWS,
    MOST_SECONDS,
    RECENT_WINDOWS,
    WINDOW_DRAFTS,
    WINDOW_SECONDS,
    AcceptanceWatch,
)


class Traffic:
    """Counters of first drafts that rise from window to window. Mutable: the tests add to it."""

    def __init__(self, seed: int = 0) -> None:
        self.watch = AcceptanceWatch()
        self.random = numpy.random.default_rng(seed)
        self.seconds, self.num_drafted, self.num_accepted = 50.0, 0, 0
        self.watch.read(self.seconds, 0, 0)

    def add(
        self, num_accepted: int, num_drafted: int = WINDOW_DRAFTS, seconds: float = WINDOW_SECONDS
    ) -> bool:
        """Returns whether the acceptance is in its band after these drafts."""
        self.seconds += seconds
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.watch.read(self.seconds, self.num_drafted, self.num_accepted)
        return self.watch.is_in_band

    def windows(self, rate: float, count: int) -> list[bool]:
        """Adds windows with the noise of chance."""
        return [self.add(int(drawn)) for drawn in self.random.binomial(WINDOW_DRAFTS, rate, count)]


def test_a_fall_is_told_once_and_the_return_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway.server")
    traffic = Traffic()
    assert all(traffic.windows(0.8, 1000))
    after = traffic.windows(0.2, 100)
    # The mean of the last 12 windows is below half of 0.8 once more than 8 of them have 0.2.
    assert after == [True] * after.index(False) + [False] * (100 - after.index(False))
    assert after.index(False) in (7, 8, 9)
    back = traffic.windows(0.8, 100)
    assert back == [False] * back.index(True) + [True] * (100 - back.index(True))
    assert back.index(True) < RECENT_WINDOWS
    left, returned = caplog.records
    assert (left.levelname, returned.levelname) == ("WARNING", "INFO")
    assert left.fields["first_draft_acceptance"] == pytest.approx(0.375, abs=0.03)
    assert left.fields["usual_first_draft_acceptance"] == pytest.approx(0.8, abs=0.01)
    for told in ("% of the first drafts", "another kind", "chat template", "MTP head", "Texts are right"):
        assert told in left.getMessage()


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.7, 0.95])
def test_noise_about_the_mean_is_never_told(rate: float) -> None:
    assert all(Traffic(seed=round(100 * rate)).windows(rate, 10_000))


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.04, 0.2])
def test_low_acceptance_from_the_start_is_never_told(rate: float) -> None:
    assert all(Traffic(seed=round(100 * rate)).windows(rate, 10_000))


def test_nothing_is_told_before_the_usual_share_is_known() -> None:
    """With less than FIRST_WINDOWS before the recent ones."""
    traffic = Traffic()
    assert all(traffic.windows(0.9, FIRST_WINDOWS - 1) + traffic.windows(0.0, RECENT_WINDOWS))
    assert not traffic.add(0)


def test_kinds_of_traffic_that_take_turns_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A minute of the one, a minute of the other: what is usual is their mean."""
    traffic = Traffic()
    for _ in range(500):
        traffic.windows(0.9, 6)
        traffic.windows(0.1, 6)
    assert caplog.records == []


@pytest.mark.parametrize("rate", [0.4, 0.48, 0.56])
def test_a_share_near_a_limit_is_told_at_most_once(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    """0.8 was usual, so that the limits are 0.4 and 0.56."""
    traffic = Traffic(seed=7)
    traffic.windows(0.8, LONG_WINDOWS)
    traffic.windows(rate, 300)
    assert len(caplog.records) == (rate < 0.48)


def test_a_lasting_change_becomes_usual_within_a_day() -> None:
    traffic = Traffic()
    traffic.windows(0.8, LONG_WINDOWS)
    after = traffic.windows(0.25, 24 * 360)
    left = after.index(False)
    assert left < RECENT_WINDOWS
    assert not any(after[left:2000])
    assert all(after[6000:])


def test_a_head_that_is_never_right_does_not_become_usual() -> None:
    traffic = Traffic()
    traffic.windows(0.8, 1000)
    after = traffic.windows(0.0, 20_000)
    assert not any(after[RECENT_WINDOWS:])
    assert traffic.windows(0.8, RECENT_WINDOWS)[-1], "the share that was usual is still known"


def test_where_drafts_are_turned_off_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway.server")
    traffic = Traffic()
    traffic.windows(0.8, 1000)
    traffic.windows(0.1, 20)
    told = [traffic.add(0, 0, 1.0) for _ in range(1000)]
    assert told == [False] * told.index(True) + [True] * (1000 - told.index(True))
    assert told.index(True) in range(int(MOST_SECONDS) - 1, int(MOST_SECONDS) + 2)
    assert len(caplog.records) == 2
    after = traffic.windows(0.1, RECENT_WINDOWS)
    assert after == [True] * (RECENT_WINDOWS - 1) + [False], "drafts are made again, and are as bad"


def test_few_drafts_make_one_window_however_long_they_take() -> None:
    traffic = Traffic()
    traffic.windows(0.8, 50)
    for _ in range(3600):
        assert traffic.add(0, 0, 1.0)
    told = [traffic.add(0, 1, 20.0) for _ in range(RECENT_WINDOWS * WINDOW_DRAFTS)]
    assert told.index(False) + 1 in (6 * WINDOW_DRAFTS, 7 * WINDOW_DRAFTS)


def test_many_drafts_make_a_window_in_ten_seconds() -> None:
    traffic = Traffic()
    traffic.windows(0.8, 50)
    told = [traffic.add(0, 1000, 1.0) for _ in range(120)]
    assert told.index(False) + 1 in (60, 70)
