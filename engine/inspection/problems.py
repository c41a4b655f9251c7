"""Collects the errors that would keep an engine from starting, while the inspection continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.engine.protocol.errors import HeadwayError


class Problems:
    """Mutable: keeps the first error, with which a start would end."""

    def __init__(self) -> None:
        self.first: str | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Ends the block at an error of the user's or the world's, which is kept."""
        try:
            yield
        except HeadwayError as error:
            self.first = self.first or str(error)
