"""Ports for servers that are told theirs before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Linux gives outgoing connections ports from 32,768 on, so that those of other tests take none of these.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
