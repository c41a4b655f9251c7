"""Which requests wait, are sent again and are given up when the engine ends, without any engine."""

from __future__ import annotations

from headway_testing.event_stream import EventStream

from headway.engine import EngineDeadError, FinishReason, SamplingParams, Submit, TokenEvent
from headway.server.engine.flights import TRIAL_TOKENS, Flights


def request(request_id: int) -> Submit:
    return Submit(request_id=request_id, prompt_token_ids=[1, 2], sampling=SamplingParams(), max_tokens=500)


def started(limit: int, num_requests: int) -> Flights:
    flights = Flights(limit)
    for i in range(num_requests):
        flights.add([request(i)], EventStream())
    assert ids(flights) == list(range(num_requests))
    return flights


def ids(flights: Flights) -> list[int]:
    """Returns what is due."""
    return [submit.request_id for submit in flights.take_due()]


def crash(flights: Flights) -> list[str]:
    """Returns the names of what is given up, which ends."""
    lost, _ = flights.note_crash()
    names = [flight.name for flight in lost]
    flights.fail(lost, EngineDeadError("it ended"))
    return names


def pass_trial(flights: Flights, request_id: int) -> None:
    flights.deliver(TokenEvent(request_id, [5] * TRIAL_TOKENS))


def test_what_is_sent_again_has_the_tokens_that_it_got_and_what_is_new_has_none() -> None:
    flights = started(2, 2)
    flights.deliver(TokenEvent(0, [7, 8]))
    flights.deliver(TokenEvent(0, [9]))
    assert crash(flights) == []
    flights.add([request(2)], EventStream())
    assert [s.output_token_ids for s in flights.take_due()] == [[7, 8, 9], [], None]
    assert flights.num_replays == 2


def test_what_has_ended_is_not_sent_again() -> None:
    flights = started(2, 3)
    flights.deliver(TokenEvent(0, [7], FinishReason.STOP))
    assert flights.remove(1), "the engine has it"
    crash(flights)
    assert not flights.remove(1)
    assert ids(flights) == [2]


def test_after_two_crashes_suspects_run_alone_first_and_new_requests_wait() -> None:
    flights = started(2, 2)
    crash(flights)
    assert ids(flights) == [0, 1]
    flights.add([request(2)], EventStream())
    assert ids(flights) == [2]
    crash(flights)
    flights.add([request(3)], EventStream())
    assert ids(flights) == [0]
    flights.deliver(TokenEvent(0, [5] * (TRIAL_TOKENS - 1)))
    assert ids(flights) == []
    flights.deliver(TokenEvent(0, [5]))
    assert ids(flights) == [1]
    flights.deliver(TokenEvent(1, [5], FinishReason.LENGTH))
    assert ids(flights) == [2, 3], "one of them ran in the last crash only"


def test_the_suspect_that_crashes_alone_is_given_up_and_no_other() -> None:
    flights = started(2, 3)
    for _ in range(2):
        assert crash(flights) == []
        first = ids(flights)
    assert first == [0]
    pass_trial(flights, 0)
    assert ids(flights) == [1]
    # Nobody knows which of the two it was, so the one that came last is tried alone.
    assert crash(flights) == []
    assert ids(flights) == [1]
    assert crash(flights) == ["1"]
    assert ids(flights) == [2]
    pass_trial(flights, 2)
    assert ids(flights) == [0]
    assert crash(flights) == [], "those that passed begin anew"


def test_without_replay_the_first_crash_ends_all_that_ran() -> None:
    assert crash(started(0, 2)) == ["0", "1"]
    flights = started(1, 1)
    assert crash(flights) == []
    ids(flights)
    assert crash(flights) == ["0"]


def test_a_suspect_whose_client_leaves_holds_nobody_up() -> None:
    flights = started(2, 2)
    crash(flights)
    ids(flights)
    crash(flights)
    assert ids(flights) == [0]
    flights.remove(0)
    assert ids(flights) == [1]
    flights.remove(1)
    flights.add([request(2)], EventStream())
    assert ids(flights) == [2]
