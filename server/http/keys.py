"""Authorisation by API keys, and by the admin key for what changes the server. Keys are compared in
constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from starlette.datastructures import Headers

from headway.server.base.errors import ApiError

CHALLENGE = {"WWW-Authenticate": "Bearer"}


@dataclass(frozen=True, slots=True)
class Keys:
    """api: any of these keys opens the API; without any it is open. The admin key opens everything."""

    api: tuple[str, ...] = field(default=(), repr=False)
    admin: str | None = field(default=None, repr=False)

    def check(self, authorization: str) -> None:
        """authorization: the header's value. Raises ApiError 401."""
        known = (*self.api, self.admin) if self.admin is not None else self.api
        if self.api and not _is_among(_token(authorization), known):
            raise _refusal(
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )

    def check_admin(self, authorization: str) -> None:
        """Raises ApiError: 403 if there is no admin key at all, else 401."""
        if self.admin is None:
            message = "this server has no admin key; start it with --admin-key to allow this"
            raise ApiError(message, status=403, code="admin_key_not_set")
        if not _is_among(_token(authorization), [self.admin]):
            raise _refusal("this needs the admin key; send it as `Authorization: Bearer KEY`")

    def check_priority(self, priority: int | None, authorization: str) -> None:
        """Raises ApiError 403 if a request without the admin key wants to precede all others."""
        has_key = self.admin is not None and _is_among(_token(authorization), [self.admin])
        if priority is not None and priority < 0 and not has_key:
            raise ApiError(
                f"priority is {priority}; below 0 it needs the admin key (--admin-key), sent as `Authorization: Bearer KEY`; "
                "send 0 or more",
                status=403,
                param="priority",
                code="priority_not_allowed",
            )

    def owner(self, authorization: str) -> str:
        """Returns the name under which a request's cached prefixes are shared: a hash of its key, of fixed
        length, or "" if there are no keys."""
        return _hash(_token(authorization)).hex() if self.api else ""


def credentials(headers: Headers) -> str:
    """Returns the Authorization of a request: the header's value, or the x-api-key of Anthropic's clients
    if the header has no bearer token."""
    given, key = headers.get("Authorization", ""), headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not _token(given) else given


def _token(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_among(token: str, keys: Iterable[str]) -> bool:
    """Compares every key, whether or not one matches; hashes have one length whatever the key's."""
    found = [hmac.compare_digest(_hash(token), _hash(key)) for key in keys]
    return any(found)


def _hash(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()


def _refusal(message: str) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key", headers=CHALLENGE)
