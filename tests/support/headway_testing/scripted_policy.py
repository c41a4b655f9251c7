"""A depth policy that chooses as a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headway.engine.scheduling.depth.acceptance import Acceptance, Kind, Record
from headway.engine.scheduling.depth.costs import RoundLoad

MAX_DEPTH = 3


class ScriptedPolicy:
    """Chooses as it is told, else the deepest, and keeps all that it is asked and told."""

    def __init__(self, script: Sequence[int] = (), chance: random.Random | None = None) -> None:
        self.script = list(script)
        self.chance = chance
        self.asked: list[tuple[RoundLoad, list[int]]] = []
        self.told: list[tuple[RoundLoad | None, int]] = []
        self.acceptance = Acceptance(MAX_DEPTH)
        self.kinds: list[tuple[float, bool, int]] = []

    def record(self, temperature: float, *, is_masked: bool, cap: int) -> Record:
        self.kinds.append((temperature, is_masked, cap))
        return self.acceptance.record(Kind.of(temperature, is_masked=is_masked), cap)

    def choose(self, load: RoundLoad, depths: Sequence[int]) -> int:
        self.asked.append((load, list(depths)))
        if self.chance is not None:
            return self.chance.choice(depths)
        return self.script.pop(0) if self.script else depths[-1]

    def begin_round(self, depth: int) -> None:
        pass

    def undrafted_seconds(self, load: RoundLoad, depth: int, seconds: float) -> float:
        return 0.001

    def catch_up_seconds(self, load: RoundLoad) -> float:
        return 0.0005

    def end_round(self, load: RoundLoad, depth: int, seconds: float) -> None:
        self.told.append((load if load.is_usual else None, depth))
