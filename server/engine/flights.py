"""The requests in flight as one process of the engine hands them to the next: what each has got, and which of
them may be the reason for its end.

A request that ran in two lives of the engine that ended is a suspect. Suspects are sent again one after the
other: the first runs alone, the next joins once it has got past the place where the engine had ended. All
others wait until the last suspect has. Knows neither processes nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headway.engine import HeadwayError, Submit, TokenEvent

SUSPECT_CRASHES = 2
# By how many tokens a suspect has got past the place of a crash. A round gives at most 9, and the results of
# two may be lost with the engine.
TRIAL_TOKENS = 64


class Receiver(Protocol):
    """A receiver of the events of a group of requests. Its methods are called as frames arrive and must not
    raise."""

    def put(self, event: TokenEvent) -> None: ...
    def fail(self, error: HeadwayError) -> None: ...


@dataclass(slots=True, eq=False)
class Flight:
    """The requests of one group, which are sent together. Mutable: `Flights` is the only writer.

    open: those that have not ended, by id. token_ids: what each has got. starts: how many of these it had
    when it was sent last. num_crashes: lives of the engine in which it ran and that it may have ended.
    is_sent: to the life that runs now. is_replay: to an earlier one.
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
        """Returns its name in logs."""
        request_id, submit = next(iter(self.open.items()))
        return submit.label or str(request_id)

    @property
    def is_suspect(self) -> bool:
        return self.num_crashes >= SUSPECT_CRASHES

    @property
    def has_passed(self) -> bool:
        """Returns whether all of it that still runs has got past the place of the crash."""
        return all(len(self.token_ids[i]) - self.starts[i] >= TRIAL_TOKENS for i in self.open)

    def take(self) -> list[Submit]:
        """Returns what is to be sent, and notes that it is."""
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
    """Mutable: owned by the engine client. `limit`: a flight is given up after more crashes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[int, Flight] = {}
        self._waiting: list[Flight] = []  # in the order in which they are sent
        self._tried: Flight | None = None  # the suspect that was sent last
        self.num_replays = 0

    def __len__(self) -> int:
        """Returns the number of requests, those of a group one by one."""
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Returns the number of groups that wait to be sent."""
        return len(self._waiting)

    @property
    def is_trying(self) -> bool:
        return self._tried is not None

    def add(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        """The requests of a new group wait to be sent."""
        token_ids = {r.request_id: list(r.output_token_ids or ()) for r in requests}
        flight = Flight(receiver, {r.request_id: r for r in requests}, token_ids)
        self._by_id |= dict.fromkeys(flight.open, flight)
        self._waiting.append(flight)

    def deliver(self, event: TokenEvent) -> None:
        """Events of a request that is not in flight any more are dropped."""
        flight = self._by_id.get(event.request_id)
        if flight is None:
            return
        flight.token_ids[event.request_id] += event.token_ids
        if event.finish_reason is not None:
            self.remove(event.request_id)
        flight.receiver.put(event)

    def remove(self, request_id: int) -> bool:
        """Returns whether the engine that runs now has the request."""
        flight = self._by_id.pop(request_id, None)
        if flight is None:
            return False
        del flight.open[request_id]
        if not flight.open and not flight.is_sent:
            self._waiting.remove(flight)
        return flight.is_sent

    def take_due(self) -> list[Submit]:
        """Returns what is to be sent now, and notes that it is: one suspect, or all that wait."""
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
        """Everything that the engine had waits for the next one. Returns the flights that are to be given up
        instead, and whether a suspect ran alone.

        While a suspect runs beside those that were tried before it, nobody knows who ended the engine: the
        last one is then tried first, and alone.
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
        """Returns the flights that an engine of so many tokens refuses."""
        return [
            flight
            for flight in self._all()
            if any(_is_longer(s, max_model_len) for s in flight.open.values())
        ]

    def fail(self, flights: Iterable[Flight] | None, error: HeadwayError) -> list[int]:
        """Ends these flights, or all, by the error. Returns the ids of those that the engine has."""
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
