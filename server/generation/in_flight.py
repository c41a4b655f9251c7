"""The generations in flight: found by id to be aborted, counted for /load, bounded in waiting tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headway.engine import QueueFullError
from headway.server.base.errors import ApiError
from headway.server.generation.generation import Generation


class InFlight:
    """Mutable: its entries are made and removed by the answers. max_waiting_tokens: None for no limit."""

    def __init__(self, max_waiting_tokens: int | None = None) -> None:
        self._max_waiting_tokens = max_waiting_tokens
        self._generations: dict[Generation, tuple[str, ...]] = {}

    @contextmanager
    def entry(self, generation: Generation, names: Iterable[str]) -> Iterator[None]:
        """Registers the generation while it runs. Raises QueueFullError when too many prompt tokens wait
        already."""
        self._check_room(generation.num_waiting_tokens)
        self._generations[generation] = tuple(names)
        try:
            yield
        finally:
            del self._generations[generation]

    @property
    def num_requests(self) -> int:
        return len(self._generations)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of choices that have no token yet."""
        return sum(generation.num_waiting_tokens for generation in self._generations)

    def abort(self, name: str) -> int:
        """Ends the generations of that name; their clients are told. Returns how many there were."""
        found = [generation for generation, names in self._generations.items() if name in names]
        for generation in found:
            generation.fail(ApiError("the request was aborted by the operator", status=410, code="aborted"))
        return len(found)

    def _check_room(self, num_tokens: int) -> None:
        """Admits a request larger than the limit only when no other tokens wait."""
        limit, waiting = self._max_waiting_tokens, self.num_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(
                f"{waiting} prompt tokens wait and this request has {num_tokens}, the limit is {limit} "
                "(max_waiting_tokens); try again later",
                code="queue_full",
            )
