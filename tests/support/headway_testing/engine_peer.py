"""The API process's end of an engine's socket, for tests of engines that are processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from headway.engine import FromEngine, ToEngine

SECONDS = 60.0
M = TypeVar("M")


class Peer:
    """The API process's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)

    def send(self, message: ToEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def wait_for(self, kind: type[M]) -> M:
        """Returns the next message of that kind; drops the messages before it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self._socket.poll(1000):
                message = self._decoder.decode(self._socket.recv())
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} in {SECONDS} s")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
