"""Decides which web pages may use the server, by Host and Origin, which browsers set and pages cannot.

A page of any site can send requests to the machine on which it is shown. If no key keeps it out, its Origin
does; a site whose name resolves to this machine (DNS rebinding) is detected by the Host that it asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from headway.server.base.errors import ApiError

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:@/\[\]]*)(?::(?P<port>[0-9]*))?")


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """hosts: names, in lower case, that a request may ask for, with any port; None for any name.

    origins: those of --cors-origin, whose pages have the same rights as the server's own; `*` for all.
    checks_origin: whether the pages of other origins are refused.
    """

    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()
    checks_origin: bool = False

    def check_host(self, headers: Headers) -> None:
        """Raises ApiError 403. A request without Host comes from a client, not from a page."""
        if self.hosts is None:
            return
        for host in headers.getlist("host"):
            if host and _name_and_port(host)[0] not in self.hosts:
                raise ApiError(
                    f"Host is {host!r}; without --api-key a server on a loopback address takes "
                    f"{', '.join(sorted(self.hosts))}; ask for one of them, or start the server with --api-key, or with "
                    "--cors-origin and the origin of that host",
                    status=403,
                    code="host_not_allowed",
                )

    def check_origin(self, headers: Headers) -> None:
        """Raises ApiError 403 for a page of another origin, also for one that hides its origin (null)."""
        if not self.checks_origin or "*" in self.origins:
            return
        own = _name_and_port(headers.get("host", ""))
        for origin in headers.getlist("origin"):
            if origin not in self.origins and not self._is_own(origin, own):
                raise ApiError(
                    f"Origin is {origin!r}; without --api-key only the server's own pages may ask, and those that "
                    "--cors-origin names; start the server with --cors-origin and that origin, or with --api-key",
                    status=403,
                    code="origin_not_allowed",
                )

    def _is_own(self, origin: str, own: tuple[str | None, str]) -> bool:
        """Returns whether the origin is the server's own. The scheme is not compared: a proxy may have
        ended TLS."""
        name, port = _name_and_port(origin.partition("://")[2])
        is_same_host = name == own[0] or (name in LOCAL_HOSTS and own[0] in LOCAL_HOSTS)
        return bool(name) and is_same_host and port == own[1]


def local_origins(host: str, origins: Iterable[str]) -> AllowedOrigins:
    """Returns the hosts and origins that a server on a loopback address allows. host: the value of --host.
    A named origin may also be a name of the server itself."""
    origins = tuple(origins)
    named = {_name_and_port(origin.partition("://")[2])[0] or "" for origin in origins}
    own = f"[{host}]" if ":" in host else host
    hosts = None if "*" in origins else LOCAL_HOSTS | {own.lower()} | (named - {""})
    return AllowedOrigins(hosts, origins, checks_origin=True)


def _name_and_port(authority: str) -> tuple[str | None, str]:
    """Returns ("localhost", "8000") for `localhost:8000`; no name for an invalid authority."""
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    return (None, "") if match is None else (match["host"].removesuffix("."), match["port"] or "")
