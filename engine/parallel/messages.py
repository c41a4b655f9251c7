"""The messages between the first rank of a model and the others, over a pipe for each of them. Never
pickle."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from headway.engine.execution.commands import Command
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import Failure


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first message to a rank, which then loads its share of the model and answers. available: the bytes
    of the device for each rank, by which all of them limit the context alike. folder: see
    ProcessGroup.connect."""

    config: EngineConfig
    rank: int
    available: int
    folder: str


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The answer. A rank that cannot load its share answers with a Failure and leaves."""


ToRank = Join | Command
FromRank = Loaded | Failure
_ENCODER = msgspec.msgpack.Encoder()
_TO_RANK, _FROM_RANK = msgspec.msgpack.Decoder(ToRank), msgspec.msgpack.Decoder(FromRank)


def encoded(message: ToRank | FromRank) -> bytes:
    return _ENCODER.encode(message)


def received_by_rank(pipe: Connection) -> ToRank:
    """Waits for the next message. Raises EOFError and OSError where the first rank has ended."""
    message: ToRank = _TO_RANK.decode(pipe.recv_bytes())
    return message


def received_by_first(pipe: Connection) -> FromRank:
    """Waits for the next message of another rank. Raises as `received_by_rank` does."""
    message: FromRank = _FROM_RANK.decode(pipe.recv_bytes())
    return message
