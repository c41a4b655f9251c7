"""Steps of padded sizes, launched kernel by kernel: on a CPU, and for comparison with the graphs of a GPU."""

from __future__ import annotations

from collections.abc import Callable

from headway.engine.execution.runner import Runner
from headway.engine.execution.step import HalfStep, StepOutcome, forward_half, sample_half
from headway.engine.execution.step_key import StepGrid, StepKey


class PaddedLaunches:
    """Takes the place of a runner's graphs: launches what they would replay, and notes the keys."""

    def __init__(self, runner: Runner, grid: StepGrid) -> None:
        self._launcher = runner.launcher
        self.launched: list[StepKey] = []
        runner.grid = grid
        runner.graphs = self  # type: ignore[assignment]

    def run(self, key: StepKey) -> tuple[StepOutcome, bool]:
        self.launched.append(key)
        return self._launcher.launch(key), False

    @property
    def mixed(self) -> list[StepKey]:
        """Returns the keys of rounds with prompts."""
        return [key for key in self.launched if key.num_rows and key.num_prompt_tokens]

    @property
    def prompts(self) -> list[StepKey]:
        """Returns the keys of prompts alone."""
        return [key for key in self.launched if not key.num_rows]


class SplitSteps:
    """Takes the place of a runner's graphs: runs each step as two halves, on a GPU rounds as two graphs from
    the second time on."""

    def __init__(self, runner: Runner, grid: StepGrid) -> None:
        self._launcher = runner.launcher
        self._memory = None if runner.graphs is None else runner.graphs.memory
        self._halves: dict[StepKey, tuple[Callable[[], None], Callable[[], None], StepOutcome]] = {}
        self.launched: list[StepKey] = []
        runner.grid = grid
        runner.graphs = self  # type: ignore[assignment]

    def run(self, key: StepKey) -> tuple[StepOutcome, bool]:
        if key.catches_up:  # no forward pass of the target, so that it has no halves
            self.launched.append(key)
            return self._launcher.launch(key), False
        # After prompts alone there may be nothing left for the second graph.
        if self._memory is None or not key.num_rows or key not in self.launched:
            self.launched.append(key)
            return self._launch(key), False
        if key not in self._halves:
            self._capture(key)
        first, second, outcome = self._halves[key]
        first()
        second()
        return outcome, True

    def _launch(self, key: StepKey) -> StepOutcome:
        return self._second(key, self._first(key))

    def _capture(self, key: StepKey) -> None:
        assert self._memory is not None
        first, half = self._memory.capture(lambda: self._first(key))
        second, outcome = self._memory.capture(lambda: self._second(key, half))
        self._halves[key] = (first.replay, second.replay, outcome)

    def _first(self, key: StepKey) -> HalfStep:
        rows, prompts = self._launcher.operands(key)
        return forward_half(self._launcher.context, rows, key.depth, prompts)

    def _second(self, key: StepKey, half: HalfStep) -> StepOutcome:
        return sample_half(self._launcher.context, half, keeps_logits=key.keeps_logits)
