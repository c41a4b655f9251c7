"""Fills free rows and blocks with rubbish before each step, so that a read of them shows."""

from __future__ import annotations

import torch

from headway.engine.execution.masked_step import BegunStep
from headway.engine.execution.runner import Runner
from headway.engine.loop import Handle
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.state.specs import RowSpec

# On the CPU attention multiplies what it does not see by 0, which cannot be NaN unless a model overflows.
FINITE_RUBBISH = 12345.0
# Say that a row is free, and that it has no blocks.
KEPT = {"limits", "state_ids", "granted_block_ids", "kv_block_ids", "is_used"}


class PoisoningRunner:
    """A runner whose free rows hold NaN, huge integers and penalties of others, in the state of recurrent
    layers and of the drafter, too, and whose free blocks and checkpoints hold NaN and huge integers.

    Blocks that still hold a prefix are not free. Mutable: knows which rows are taken.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._blocks = scheduler.state.blocks
        self._checkpoints = scheduler.state.prefixes._checkpoints
        self._taken: set[int] = set()
        self._poisoned: set[int] = set()

    def launch(self, plan: Plan) -> Handle:
        self.poison()
        self._taken -= set(plan.released_rows) | {move.source for move in plan.moves}
        self._taken |= {move.target for move in plan.moves} | {setup.row for setup in plan.setups}
        return self._runner.launch(plan)

    def begin(self, plan: Plan) -> BegunStep:
        self.poison()
        self._taken -= set(plan.released_rows) | {move.source for move in plan.moves}
        self._taken |= {move.target for move in plan.moves} | {setup.row for setup in plan.setups}
        return self._runner.begin(plan)

    def poison(self) -> None:
        """Fills as the next launch does; what that is given afterwards it fills again with the same."""
        self._poison_blocks()
        self._poison_rows()

    def _poison_rows(self) -> None:
        slots = self._runner.rows
        num_rows = len(slots.limits)
        index = [row for row in range(num_rows) if row not in self._taken]
        places = torch.tensor(index, dtype=torch.int64, device=slots.limits.device)
        for name, tensor in slots.tensors().items():
            if name not in KEPT:
                tensor.index_fill_(0, places, rubbish_of(tensor))
        free = [] if self._checkpoints is None else self._checkpoints._free
        checkpoints = torch.tensor(free, dtype=torch.int64, device=places.device) + num_rows
        state_ids = slots.state_ids[places]
        for spec, memory in self._runner.pool._memory.items():
            if isinstance(spec, RowSpec):
                entries = state_ids if spec.is_scratch else torch.cat([state_ids, checkpoints])
                memory.index_fill_(1, entries, rubbish_of(memory))
        for name, tensor in self._runner.processors.first(num_rows).tensors().items():
            if name not in KEPT:  # token ids of an earlier request: any, but of the vocabulary
                tensor.index_fill_(0, places, rubbish_of(tensor) if tensor.is_floating_point() else 1)

    def _poison_blocks(self) -> None:
        """Fills blocks that have become free since the last step, which at first are all."""
        pool = self._runner.pool
        free = set(self._blocks._free)
        new = sorted(free - self._poisoned)
        self._poisoned = free
        if not new:
            return
        device = self._runner.device
        rubbish = float("nan") if device.type == "cuda" else FINITE_RUBBISH
        places = torch.tensor(new, dtype=torch.int64, device=device)
        for tensor in pool.by_block():
            tensor.index_fill_(0, places, rubbish if tensor.is_floating_point() else rubbish_of(tensor))


def rubbish_of(tensor: torch.Tensor) -> float:
    """Returns NaN, a huge integer, or True."""
    if tensor.is_floating_point():
        return float("nan")
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3
