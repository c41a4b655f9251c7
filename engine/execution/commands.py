"""The actions of a runner as values, which the runners of the other ranks of a model repeat in the same
order."""

from __future__ import annotations

import msgspec

from headway.engine.scheduling.plan import Plan


class Launch(msgspec.Struct, tag=True, frozen=True):
    """A step without masked rows."""

    plan: Plan


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first half of a step with masked rows."""

    plan: Plan


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The second half. entries: the entry of the masks for each row. masks: the content of the table's buffer
    up to the last of them."""

    entries: dict[int, int]
    masks: bytes


class Capture(msgspec.Struct, tag=True, frozen=True):
    """Captures the steps of these depths."""

    depths: tuple[int, ...]


class TimeRound(msgspec.Struct, tag=True, frozen=True):
    """A round of padding, whose time is measured."""

    num_rows: int
    depth: int


class TimeCatchUp(msgspec.Struct, tag=True, frozen=True):
    """The drafter catches up with rows of padding, whose time is measured."""

    num_rows: int


Command = Launch | Begin | Finish | Capture | TimeRound | TimeCatchUp


def tell_nobody(command: Command) -> None:
    """Ignores the command: the model has one rank."""
