"""Probes and scrapes: what they ask again and again does not fill the log."""

from __future__ import annotations

from headway.server.http.page import PAGE_PATHS

METHODS = ("GET", "HEAD")
PATHS = PAGE_PATHS | {
    "/", "/dashboard/data", "/favicon.ico", "/health", "/health/generate", "/load", "/metrics", "/ping", "/ready",
    "/version",
}  # fmt: skip
MAX_REMEMBERED = 1024  # pairs of path and client
Outcome = tuple[int, str | None]  # status and code of the error


class Probes:
    """Tells which outcomes of probes are news: a failure when it begins, changes or ends, for each client.

    Mutable: the access log is its only writer.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], Outcome] = {}

    def is_news(self, path: str, client: str, outcome: Outcome) -> bool:
        """client: its address without the port, which changes from probe to probe."""
        key, is_failure = (path, client), outcome[0] >= 400
        previous = self._failures.pop(key, None)
        if is_failure:
            self._failures[key] = outcome
            if len(self._failures) > MAX_REMEMBERED:
                del self._failures[next(iter(self._failures))]
        return previous != (outcome if is_failure else None)
