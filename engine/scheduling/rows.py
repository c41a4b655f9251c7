"""Tracks which request has which row of the table. Does not know what a row holds."""

from __future__ import annotations

from headway.engine.scheduling.plan import RowMove
from headway.engine.scheduling.request import Request


class RowTable:
    """Mutable: the scheduler is its only writer; it also writes `request.row`.

    A request keeps its row until it ends, or until `compact` moves it.
    """

    def __init__(self, max_rows: int) -> None:
        self._requests: list[Request | None] = [None] * max_rows
        self._num_taken = 0
        self._released: list[int] = []

    @property
    def is_full(self) -> bool:
        return self._num_taken == len(self._requests)

    @property
    def num_free(self) -> int:
        return len(self._requests) - self._num_taken

    def take(self, request: Request) -> None:
        """Gives the request the lowest free row."""
        assert request.row is None, f"request {request.request_id} has row {request.row} already"
        self._place(request, self._requests.index(None))
        self._num_taken += 1

    def release(self, request: Request) -> None:
        assert request.row is not None, f"request {request.request_id} has no row"
        self._requests[request.row] = None
        self._num_taken -= 1
        self._released.append(request.row)
        request.row = None

    def compact(self) -> tuple[RowMove, ...]:
        """Moves the highest requests into the lowest free rows, so that n requests have rows [0, n).

        Since the lowest free row is taken first, no request that came after the last call is above a free
        row: only rows that the device knows are moved.
        """
        holes = [row for row in range(self._num_taken) if self._requests[row] is None]
        if not holes:
            return ()
        tail = range(len(self._requests) - 1, self._num_taken - 1, -1)
        above = [request for row in tail if (request := self._requests[row]) is not None]
        return tuple(self._move(request, hole) for hole, request in zip(holes, above, strict=True))

    def drain_released(self) -> tuple[int, ...]:
        """Returns the rows that were released since the last call."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def _move(self, request: Request, target: int) -> RowMove:
        source = request.row
        assert source is not None, f"request {request.request_id} has no row"
        assert source > target, f"row {source} cannot move up to {target}"
        self._requests[source] = None
        self._place(request, target)
        return RowMove(source=source, target=target)

    def _place(self, request: Request, row: int) -> None:
        self._requests[row] = request
        request.row = row
