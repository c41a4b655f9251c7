"""Executes the commands of the first rank's runner on another rank."""

from __future__ import annotations

from typing import assert_never

from headway.engine.execution.commands import Begin, Capture, Command, Finish, Launch, TimeCatchUp, TimeRound
from headway.engine.execution.masked_step import BegunStep
from headway.engine.execution.runner import Runner


class Follower:
    """Mutable: keeps the step that was begun last, and is the only caller of its runner. Results are not
    read, since they equal those of the first rank."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._begun: BegunStep | None = None

    def follow(self, command: Command) -> None:
        match command:
            case Launch():
                self._runner.launch(command.plan)
            case Begin():
                self._begun = self._runner.begin(command.plan)
            case Finish():
                assert self._begun is not None, "the step was begun"
                self._runner.masks.fill(command.masks)
                self._begun.finish(command.entries)
                self._begun = None
            case Capture():
                self._runner.capture(command.depths, progress=lambda _: None)
            case TimeRound():
                self._runner.time_round(command.num_rows, command.depth)
            case TimeCatchUp():
                self._runner.time_catch_up(command.num_rows)
            case _:
                assert_never(command)
