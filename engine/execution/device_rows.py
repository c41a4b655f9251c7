"""The rows of running requests on the device, which plans change: set-up, moves, grants of blocks and
release."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from headway.engine.protocol.errors import describe_fault
from headway.engine.scheduling.plan import BlockGrant, CheckpointSave, Plan, RowMove, RowSetup
from headway.engine.speculation.ngram import PREDICTIONS
from headway.engine.speculation.relaxed import RelaxedAcceptance
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import LogitsProcessorTable
from headway.engine.state.row_tensors import RowTensors, numbers_of
from headway.engine.state.transfer import to_device

logger = logging.getLogger(__name__)


class DeviceRows:
    """The tensors of the rows, their state in the pool, their logits processors, and which of them return
    log-probabilities.

    Mutable: it is their only writer on the host, by the plans that it gets; steps write the tensors and the
    state on the device.
    """

    def __init__(
        self,
        numbers: RowTensors,
        pool: StatePool,
        processors: LogitsProcessorTable,
        relaxed: RelaxedAcceptance | None = None,
    ) -> None:
        self.numbers = numbers
        self._pool = pool
        self.processors = processors
        self._relaxed = relaxed
        self.num_logprobs: dict[int, int] = {}  # by row, for rows that return any
        self._views: dict[tuple[int, bool], RowTensors] = {}

    def __len__(self) -> int:
        return len(self.numbers.limits)

    @property
    def device(self) -> torch.device:
        return self.numbers.limits.device

    def first(self, num_rows: int, *, is_adjusted: bool) -> RowTensors:
        """Returns a view of the first rows, with their logits processors if is_adjusted; views are made
        once."""
        key = (num_rows, is_adjusted)
        if key not in self._views:
            processors = self.processors.first(num_rows) if is_adjusted else None
            self._views[key] = self.numbers.first(num_rows, processors)
        return self._views[key]

    def at(self, index: torch.Tensor) -> RowTensors:
        """Returns a copy of the rows [n] int64, with their logits processors if any row uses some."""
        return self.numbers.at(index, self.processors.at(index) if self.processors.is_used else None)

    def update(self, plan: Plan) -> tuple[tuple[int, str], ...]:
        """Applies the plan's changes of rows, in the order of its fields.

        Returns the request id and a description for each request that cannot be set up; its row stays
        padding.
        """
        self.release(plan.released_rows)
        self.move(plan.moves)
        faults = self.set_up(plan.setups)
        self.grant(plan.grants)
        return faults

    def release(self, rows: Sequence[int]) -> None:
        """Turns the rows into padding."""
        if not rows:
            return
        self.numbers.release(to_device(rows, self.device))
        for row in rows:
            self.processors.release(row)
            self.num_logprobs.pop(row, None)

    def move(self, moves: Sequence[RowMove]) -> None:
        """Moves rows to free ones."""
        if not moves:
            return
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        self.numbers.move(to_device(sources, self.device), to_device(targets, self.device))
        for source, target in zip(sources, targets, strict=True):
            self.processors.move(source, target)
            if source in self.num_logprobs:
                self.num_logprobs[target] = self.num_logprobs.pop(source)

    def set_up(self, setups: Sequence[RowSetup]) -> tuple[tuple[int, str], ...]:
        """Sets up the rows of requests. Returns the faults as `update` does."""
        faults: list[tuple[int, str]] = []
        numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        taken: list[RowSetup] = []
        for setup in setups:
            try:
                self._prepare(setup)
                numbers.append(numbers_of(setup))
                taken.append(setup)
            except Exception as error:
                logger.exception("request %d could not be set up", setup.request_id)
                self.release([setup.row])
                faults.append((setup.request_id, describe_fault(error)))
        if numbers:
            integers, floats = (torch.stack(column) for column in zip(*numbers, strict=True))
            on_device = to_device(integers, self.device)
            self.numbers.set_up(on_device, to_device(floats, self.device, torch.float32))
            self._keep_predictions(setups)
            if self._relaxed is not None:
                self._relaxed.set_up(self.numbers.state_ids.index_select(0, on_device[:, 0]), taken)
            if self._pool.has_row_state:
                state_ids = self.numbers.state_ids.index_select(0, on_device[:, 0])
                checkpoints = [-1 if setup.checkpoint is None else setup.checkpoint for setup in taken]
                self._pool.start_rows(state_ids, to_device(checkpoints, self.device))
        return tuple(faults)

    def _keep_predictions(self, setups: Sequence[RowSetup]) -> None:
        """Writes the predicted outputs, if the drafter searches them."""
        kept = self._pool.drafter.get(PREDICTIONS)
        if kept is None:
            return
        for setup in setups:
            if tokens := setup.prediction_token_ids:
                state_id = self.numbers.state_ids[setup.row : setup.row + 1]
                kept[:, : len(tokens)].index_copy_(0, state_id, to_device([tokens], self.device, kept.dtype))

    def _prepare(self, setup: RowSetup) -> None:
        """Sets up the optional parts of a row."""
        if setup.history is not None:
            self.processors.set_up(setup.row, setup.sampling, setup.history)
        if setup.sampling.num_logprobs is not None:
            self.num_logprobs[setup.row] = setup.sampling.num_logprobs

    def save(self, saves: Sequence[CheckpointSave]) -> None:
        """Copies the state of rows to checkpoints."""
        if not saves:
            return
        rows, checkpoints = to_device(
            [[save.row for save in saves], [save.checkpoint for save in saves]], self.device
        )
        self._pool.save_rows(self.numbers.state_ids.index_select(0, rows), checkpoints)

    def grant(self, grants: Sequence[BlockGrant]) -> None:
        """Writes all new blocks by one copy of their indices in the flat table and their ids."""
        if not grants:
            return
        table = self.numbers.granted_block_ids
        width = table.shape[1]
        places = [
            grant.row * width + index
            for grant in grants
            for index in range(grant.first_index, grant.first_index + len(grant.block_ids))
        ]
        ids = [block_id for grant in grants for block_id in grant.block_ids]
        where, what = to_device([places, ids], self.device)
        table.view(-1).index_copy_(0, where, what)
