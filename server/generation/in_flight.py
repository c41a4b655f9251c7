"""The generations in flight, found by id for an abort, and counted for /load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from headway.server.base.errors import ApiError
from headway.server.generation.generation import Generation


class InFlight:
    """Mutable: the answers add and remove its entries."""

    def __init__(self) -> None:
        self._generations: dict[Generation, tuple[str, ...]] = {}

    @contextmanager
    def entry(self, generation: Generation, names: Iterable[str]) -> Iterator[None]:
        """Registers the generation while it runs."""
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
        """Returns the prompt tokens of choices that have no token yet."""
        return sum(generation.num_waiting_tokens for generation in self._generations)

    def abort(self, name: str) -> int:
        """Ends the generations of that name with an error for their clients. Returns their number."""
        found = [generation for generation, names in self._generations.items() if name in names]
        for generation in found:
            generation.fail(ApiError("the request was aborted by the operator", status=410, code="aborted"))
        return len(found)
