"""Chooses the replica of a request: the one that has probably computed the same prefix before.

A hash ring gives each key an owner, and most keys keep theirs when replicas come and go (Karger et al.,
1997). An owner with far more requests than the others is skipped, as in consistent hashing with bounded loads
(Mirrokni et al., 2018). Nothing is remembered between requests, so that any number of ingresses agree.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

NUM_POINTS = 64  # points of a replica on the ring; shares differ by some 10 %
# The bytes of a prompt, or of a user's first message, that count: some 16 blocks of 16 tokens, which requests
# about one document share.
KEY_BYTES = 1024
# An owner may have a quarter more requests than the mean, and 8 more: up to there a cached prefix is worth
# more than an even load.
LOAD_SHARE, LOAD_SLACK = 1.25, 8


class _Message(msgspec.Struct):
    role: str = ""


class _Body(msgspec.Struct):
    """The fields that a prompt is made of, as the client wrote them; each API has some of them."""

    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: list[msgspec.Raw] = []
    input: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


def prompt_key(body: bytes) -> bytes:
    """Returns the key that requests with the same prefix share: prompt_cache_key if there is one, else the
    system's messages and the first KEY_BYTES of the prompt or of the user's first message; all with
    cache_salt, without which no prefix matches. Empty for a body without a prompt.

    A conversation keeps its key while it grows, since the key ends with the first message of its user.
    """
    try:
        found = msgspec.json.decode(body, type=_Body)
        turns = found.messages or _turns(found.input)
        before, first = _opening(turns)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return b""
    text = found.prompt_cache_key.encode(errors="surrogatepass") if found.prompt_cache_key else b""
    if not text:
        begin = first[:KEY_BYTES] or bytes(found.prompt)[:KEY_BYTES]
        text = b"".join(map(bytes, (found.system, found.instructions, *before))) + begin
    salt = (found.cache_salt or "").encode(errors="surrogatepass")
    return salt + b"\0" + text if text else b""


def _turns(items: msgspec.Raw) -> list[msgspec.Raw]:
    """Returns the items of the input of /v1/responses, which may be a text."""
    if not bytes(items).startswith(b"["):
        return [items] if bytes(items) else []
    return msgspec.json.decode(items, type=list[msgspec.Raw])


def _opening(turns: list[msgspec.Raw]) -> tuple[list[msgspec.Raw], bytes]:
    """Returns the messages before the first one of the user, and that one."""
    for i, turn in enumerate(turns):
        text = bytes(turn)
        if not text.startswith(b"{") or msgspec.json.decode(turn, type=_Message).role == "user":
            return turns[:i], text
    return turns, b""


@dataclass(frozen=True, slots=True)
class Ring:
    """The points of all replicas. points: hashes in ascending order. owners: the replica of each point."""

    points: tuple[int, ...]
    owners: tuple[str, ...]

    def owner(self, key: bytes) -> str:
        index = bisect.bisect(self.points, _hash(key)) % len(self.points)
        return self.owners[index]


@lru_cache(maxsize=8)
def ring_of(replicas: frozenset[str]) -> Ring:
    """Returns the ring of at least one replica."""
    placed = sorted((_hash(f"{name} {i}".encode()), name) for name in replicas for i in range(NUM_POINTS))
    return Ring(tuple(point for point, _ in placed), tuple(name for _, name in placed))


def _hash(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def preferred(key: bytes, loads: Mapping[str, int]) -> str | None:
    """Returns the owner of the key; None if it has so many more requests than the others that the least
    loaded replica should serve. loads: the requests of each replica."""
    owner = ring_of(frozenset(loads)).owner(key)
    mean = sum(loads.values()) / len(loads)
    return owner if loads[owner] <= LOAD_SHARE * mean + LOAD_SLACK else None


def least_loaded(loads: Mapping[str, int]) -> list[str]:
    """Returns the replicas that have the fewest requests."""
    fewest = min(loads.values())
    return [name for name, load in loads.items() if load == fewest]
