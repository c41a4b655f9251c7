"""How prompts that come together are computed beside streams; served in simulated time."""

from __future__ import annotations

import random

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle
from headway_testing.simulated_server import POLICY, SimulatedServer, Stream, percentile

from headway.engine.scheduling import prefill_policy
from headway.engine.scheduling.prefill_policy import (
    GAPS_PER_LONG_GAP,
    LEAST_BURST,
    Load,
    PrefillPolicy,
    long_gaps_after,
)

NUM_STREAMS, NUM_REQUESTS = 128, 384
MOST_TIMES_ALONE, MOST_TIMES_MEDIAN = 1.25, 1.9
LONG_SECONDS = 0.05


def load(
    *,
    num_rows: int = 32,
    num_waiting: int = LEAST_BURST,
    most: float = 0.0,
    all_of_them: float = 0.0,
    seconds_full: float = 0.0,
) -> Load:
    return Load(num_rows, True, 0, seconds_full, num_rows, num_waiting, most, all_of_them)


@pytest.fixture(scope="module")
def seconds_alone() -> float:
    """What the prompts take by themselves."""
    server = SimulatedServer(0, max_depth=0, output_len=1)
    server.closed_loop(NUM_STREAMS, NUM_STREAMS)
    return max(stream.first_seconds for stream in server.streams)


def gaps_of(streams: list[Stream]) -> list[float]:
    return [gap for stream in streams for gap in stream.gaps]


@pytest.mark.parametrize(
    ("depth", "max_depth"),
    [
        ("auto", 3),
        *(pytest.param(d, most, marks=pytest.mark.slow) for d, most in ((0, 0), (0, 3), (1, 3), (2, 3))),
    ],
    ids=lambda value: f"{value}",
)
def test_a_burst_neither_waits_long_nor_gives_streams_many_long_gaps(
    depth: int | str, max_depth: int, seconds_alone: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimulatedServer(depth, max_depth=max_depth)
    server.closed_loop(NUM_STREAMS, NUM_REQUESTS)
    gaps = gaps_of(server.streams)
    first = percentile([stream.first_seconds for stream in server.streams], 99)
    assert first <= MOST_TIMES_ALONE * seconds_alone
    assert percentile(gaps, 99) <= MOST_TIMES_MEDIAN * percentile(gaps, 50)
    assert sum(gap > LONG_SECONDS for gap in gaps) < len(gaps) / 100

    monkeypatch.setattr(prefill_policy, "LEAST_BURST", NUM_REQUESTS)
    patient = SimulatedServer(depth, max_depth=max_depth)
    patient.closed_loop(NUM_STREAMS, NUM_REQUESTS)
    assert first < 0.8 * percentile([stream.first_seconds for stream in patient.streams], 99)
    assert server.tokens_per_second > 0.99 * patient.tokens_per_second


def test_a_stream_beside_bursts_without_end_has_few_long_gaps() -> None:
    server = SimulatedServer(0, max_depth=0, prompt_len=256, output_len=1)
    server.send(0.0, output_len=1000)
    server.closed_loop(32, 4000)
    gaps = server.streams[0].gaps
    assert 2 <= sum(gap > LONG_SECONDS for gap in gaps) <= 3 + len(gaps) / GAPS_PER_LONG_GAP


def test_a_stream_beside_wave_after_wave_has_few_long_gaps() -> None:
    """Those of the waves do not make up for its own."""
    server = SimulatedServer(0, max_depth=0)
    server.send(0.0, output_len=3000)
    for place in range(24 * 64):
        server.send(1.0 + place // 64, output_len=64)
    server.closed_loop(0, 0)
    gaps = server.streams[0].gaps
    assert 2 <= sum(gap > LONG_SECONDS for gap in gaps) <= 3 + len(gaps) / GAPS_PER_LONG_GAP


def test_prompts_that_come_one_by_one_get_no_long_pass() -> None:
    server = SimulatedServer("auto", max_depth=3, seed=1)
    server.open_loop(67.0, 300)
    assert max(gaps_of(server.streams)) < LONG_SECONDS
    assert all(plan.is_mixed for plan in server.plans[100:-300] if plan.prefill)


@pytest.mark.parametrize(("num_streams", "prompt_len"), [(16, 8192), (64, 4096)])
def test_long_prompts_do_not_keep_others_waiting_for_the_sake_of_few_streams(
    num_streams: int, prompt_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, patient = (SimulatedServer(3, max_depth=3, prompt_len=prompt_len) for _ in range(2))
    server.closed_loop(num_streams, 3 * num_streams)
    monkeypatch.setattr(prefill_policy, "PATIENCE_SECONDS", 1e9)
    patient.closed_loop(num_streams, 3 * num_streams)
    first, late = (
        percentile([stream.first_seconds for stream in some.streams], 50) for some in (server, patient)
    )
    assert first < 0.7 * late
    assert server.tokens_per_second > 1.15 * patient.tokens_per_second
    assert percentile(gaps_of(server.streams), 99) < LONG_SECONDS


def test_passes_of_their_own_are_for_prompts_that_wait_for_others_not_for_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for prompt_len in (128, 512):
        server, patient = (
            SimulatedServer(0, max_depth=0, prompt_len=prompt_len, max_running=128) for _ in range(2)
        )
        server.closed_loop(256, 768)
        with monkeypatch.context() as patch:
            patch.setattr(prefill_policy, "PATIENCE_SECONDS", 1e9)
            patient.closed_loop(256, 768)
        assert server.tokens_per_second > 0.99 * patient.tokens_per_second
        most, usual = (percentile(gaps_of(some.streams), 99) for some in (server, patient))
        assert most < 1.1 * usual


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8192),
        ({"num_waiting": LEAST_BURST - 1}, 128),
        ({"num_rows": 100, "num_waiting": 24}, 256),
        ({"num_rows": 100, "num_waiting": 25}, 8192),
        ({"most": 2.0, "all_of_them": 31.9}, 8192),
        ({"all_of_them": 32.0}, 128),
        ({"most": 2.01}, 128),
        ({"most": 2.01, "seconds_full": 1.01}, 1024),
        ({"num_waiting": 1, "seconds_full": 1.01}, 1024),
        ({"num_waiting": 1, "seconds_full": 1.0}, 128),
        ({"num_waiting": 1, "seconds_full": 1.01, "num_rows": 65}, 256),
    ],
    ids=str,
)
def test_long_passes_are_for_many_prompts_and_seldom(changes: dict[str, float], expected: int) -> None:
    assert POLICY.budget(load(**changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [16, 512, 8192])
def test_a_chunk_size_that_is_set_holds_in_a_burst(chunk: int) -> None:
    policy = PrefillPolicy.uniform(chunk, mixed_above_tokens=8)
    for num_rows in (0, 8, 32, 200):
        burst, calm = (policy.budget(load(num_rows=num_rows, num_waiting=n)) for n in (50, 1))
        assert burst == calm <= chunk


def test_long_gaps_are_made_up_for_by_others() -> None:
    owed = long_gaps_after(0.0, 10, is_long=True)
    assert owed == 10
    for _ in range(GAPS_PER_LONG_GAP // 2):
        owed = long_gaps_after(owed, 10, is_long=False)
    assert owed == pytest.approx(5)
    assert long_gaps_after(0.01, 10, is_long=False) == 0


@pytest.mark.parametrize("options", [{}, {"prompt_grid": 32, "num_checkpoints": 8}], ids=["keys", "state"])
def test_long_passes_change_no_text(options: dict[str, int]) -> None:
    chance = random.Random(0)
    policy = PrefillPolicy(idle=256, separate=48, mixed=32, mixed_above_tokens=4)
    device = ScheduledDevice(
        num_blocks=256, depth=2, prefill=policy, accept=lambda num_valid: chance.randint(0, num_valid), **options
    )  # fmt: skip
    requests = [device.add(chance.randint(1, 60), max_tokens=40) for _ in range(4)]
    device.step_until_round()
    requests += [device.add(chance.randint(1, 90), max_tokens=chance.randint(1, 40)) for _ in range(12)]
    plan, _ = device.step_until_prompts()
    assert not plan.is_mixed
    assert sum(len(chunk.token_ids) for chunk in plan.prefill) > policy.separate
    device.drain()
    assert [request.output_token_ids for request in requests] == [oracle(request) for request in requests]
