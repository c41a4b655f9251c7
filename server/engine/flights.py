"""The requests in flight, as one engine process leaves them to the next: the tokens that each has got, and
which of them may have caused the end.

A request that ran in two lives of the engine that ended is a suspect. Suspects are sent again one after the
other: the first runs alone, the next joins once it has got past the position of the crash. All others wait
until the last suspect has. This module knows neither processes nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headway.engine import HeadwayError, Submit, TokenEvent

SUSPECT_CRASHES = 2
# The number of tokens after which a suspect has got past the position of a crash. A round gives at most 9,
# and the results of two rounds may be lost with the engine.
TRIAL_TOKENS = 64


class Receiver(Protocol):
    """A receiver of the events of a group of requests. Its methods are called as frames arrive, and must
    not raise."""

    def put(self, event: TokenEvent) -> None: ...
    def fail(self, error: HeadwayError) -> None: ...


@dataclass(slots=True, eq=False)
class Flight:
    """The requests of one group, which are sent together. Mutable: `Flights` is the only writer.

    open: the requests that have not ended, by id. token_ids: the tokens that each has got. starts: the number
    of these tokens when it was sent last. num_crashes: the lives of the engine in which it ran and that it
    may have ended. is_sent: whether the present life has it. is_replay: whether an earlier life had it.
    """

    receiver: Receiver
    open: dict[int, Submit]
    token_ids: dict[int, list[int]]
    starts: dict[int, int] = field(default_factory=dict)
    num_crashes: int = 0
    is_sent: bool = False
    is_replay: bool = False

    @property
    def name(self) -> str:
        """Returns the name for logs."""
        request_id, submit = next(iter(self.open.items()))
        return submit.label or str(request_id)

    @property
    def is_suspect(self) -> bool:
        return self.num_crashes >= SUSPECT_CRASHES

    @property
    def has_passed(self) -> bool:
        """Returns whether all of its running requests have got past the position of the crash."""
        return all(len(self.token_ids[i]) - self.starts[i] >= TRIAL_TOKENS for i in self.open)

    def take(self) -> list[Submit]:
        """Returns the requests to send, and notes that they are sent."""
        self.starts = {request_id: len(self.token_ids[request_id]) for request_id in self.open}
        submits = list(self.open.values())
        if self.is_replay:
            submits = [
                msgspec.structs.replace(submit, output_token_ids=self.token_ids[submit.request_id])
                for submit in submits
            ]
        self.is_sent = self.is_replay = True
        return submits


class Flights:
    """Mutable: owned by the engine client. `limit`: a flight that has had more crashes is given up."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[int, Flight] = {}
        self._waiting: list[Flight] = []  # in the order in which they are sent
        self._tried: Flight | None = None  # the suspect that was sent last
        self.num_replays = 0

    def __len__(self) -> int:
        """Returns the number of requests, counting each of a group."""
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Returns the number of groups that wait to be sent."""
        return len(self._waiting)

    @property
    def is_trying(self) -> bool:
        return self._tried is not None

    def add(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        """Adds a new group, whose requests wait to be sent."""
        token_ids = {r.request_id: list(r.output_token_ids or ()) for r in requests}
        flight = Flight(receiver, {r.request_id: r for r in requests}, token_ids)
        self._by_id |= dict.fromkeys(flight.open, flight)
        self._waiting.append(flight)

    def deliver(self, event: TokenEvent) -> None:
        """Passes an event on to its receiver. Events of a request that is no longer in flight are dropped."""
        flight = self._by_id.get(event.request_id)
        if flight is None:
            return
        flight.token_ids[event.request_id] += event.token_ids
        if event.finish_reason is not None:
            self.remove(event.request_id)
        flight.receiver.put(event)

    def remove(self, request_id: int) -> bool:
        """Removes a request. Returns whether the present engine has it."""
        flight = self._by_id.pop(request_id, None)
        if flight is None:
            return False
        del flight.open[request_id]
        if not flight.open and not flight.is_sent:
            self._waiting.remove(flight)
        return flight.is_sent

    def take_due(self) -> list[Submit]:
        """Returns the requests to send now, and notes that they are sent: one suspect, or all that wait."""
        if self._tried is not None and not self._tried.has_passed:
            return []
        if self._tried is not None:
            self._tried.num_crashes = 0
        self._tried = next((flight for flight in self._waiting if flight.is_suspect), None)
        if self._tried is None:
            due, self._waiting = self._waiting, []
        else:
            due = [self._tried]
            self._waiting.remove(self._tried)
        self.num_replays += sum(flight.is_replay for flight in due)
        return [submit for flight in due for submit in flight.take()]

    def note_crash(self) -> tuple[list[Flight], bool]:
        """Lets everything that the engine had wait for the next one. Returns the flights to give up instead,
        and whether a suspect ran alone.

        While a suspect runs together with those that were tried before it, the cause of a crash is unknown:
        the last suspect is then tried first, and alone.
        """
        tried, self._tried = self._tried, None
        ran = [flight for flight in dict.fromkeys(self._by_id.values()) if flight.is_sent]
        is_alone = tried is not None and ran == [tried]
        for flight in ran:
            flight.is_sent = False
            flight.num_crashes += tried is None or is_alone
        self._waiting = [*ran, *self._waiting]
        return [flight for flight in ran if flight.num_crashes > self._limit], is_alone

    def longer_than(self, max_model_len: int) -> list[Flight]:
        """Returns the flights that an engine with this context length refuses."""
        return [
            flight
            for flight in self._all()
            if any(_is_longer(s, max_model_len) for s in flight.open.values())
        ]

    def fail(self, flights: Iterable[Flight] | None, error: HeadwayError) -> list[int]:
        """Fails these flights, or all, with the error. Returns the ids of the requests that the engine
        has."""
        ended = list(self._all() if flights is None else flights)
        sent = [i for flight in ended for i in list(flight.open) if self.remove(i)]
        for flight in ended:
            flight.receiver.fail(error)
        return sent

    def _all(self) -> Iterable[Flight]:
        return dict.fromkeys(self._by_id.values())


def _is_longer(submit: Submit, max_model_len: int) -> bool:
    length = len(submit.prompt_token_ids) + submit.max_tokens - 1
    return length >= max_model_len and submit.max_tokens > 1
