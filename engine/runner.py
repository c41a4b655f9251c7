"""Turns plans into device work: rows of the slot table, prefill chunks, decode rounds.

Knows tensors and the model; knows nothing of requests beyond their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from headway.engine.adjustments import AdjustmentTable
from headway.engine.batch import BlockGrant, Plan, PrefillChunk, RowMove, RowSetup
from headway.engine.cache.pool import KVPool
from headway.engine.errors import describe_fault
from headway.engine.models.inputs import ForwardInputs, Segment
from headway.engine.models.registry import CausalLM
from headway.engine.results import DeviceResults, RoundHandle
from headway.engine.round import decode_round
from headway.engine.sampler import SCORED_AT_ONCE, pick_tokens, score_tokens
from headway.engine.slots import SlotTable
from headway.engine.speculation.draft import Drafter, mtp_drafts
from headway.engine.speculation.synthetic import SyntheticAcceptance

logger = logging.getLogger(__name__)


class Runner:
    """Owns the model, the KV pool, the slot table and what stands beside it: the only writer on the host side."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        slots: SlotTable,
        *,
        adjustments: AdjustmentTable | None = None,
        drafter: Drafter = mtp_drafts,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.slots = slots
        self.device = slots.kv_lengths.device
        self.adjustments = adjustments or AdjustmentTable(
            len(slots.limits), model.config.vocab_size, self.device
        )
        self._num_logprobs: dict[int, int] = {}  # by row, for those that want any
        self._drafter = drafter
        self._synthetic = synthetic
        self._views: dict[tuple[int, bool], SlotTable] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RoundHandle:
        """Starts all the work of one step, in the order of the plan's fields."""
        for row in plan.released_rows:
            self._release(row)
        for move in plan.moves:
            self._move(move)
        faults = [fault for setup in plan.setups if (fault := self._try_set_up(setup)) is not None]
        for grant in plan.grants:
            self._grant(grant)
        results = DeviceResults(self.device, plan.depth, tuple(faults))
        self._prefill(plan.prefill, results, speculates=plan.depth > 0)
        self._decode(len(plan.decode_request_ids), plan.depth, results)
        return RoundHandle(results)

    def _decode(self, num_rows: int, depth: int, results: DeviceResults) -> None:
        if num_rows == 0:
            return
        wanted = {row: num_top for row, num_top in self._num_logprobs.items() if row < num_rows}
        scored_rows = torch.tensor(list(wanted), device=self.device) if wanted else None
        rows = self._rows(num_rows)
        outcome = decode_round(
            self.model, self.pool, rows, depth, self._drafter, scored_rows, self._synthetic
        )
        results.emitted = outcome.emitted
        if outcome.logprobs is not None:
            results.emitted_logprobs = (wanted, outcome.logprobs)

    def _rows(self, num_rows: int) -> SlotTable:
        """The first rows; with adjustments only while a row uses any, so that nothing is spent on them else."""
        is_adjusted = self.adjustments.is_used
        key = (num_rows, is_adjusted)
        if key not in self._views:
            adjustments = self.adjustments.first(num_rows) if is_adjusted else None
            self._views[key] = self.slots.first(num_rows, adjustments)
        return self._views[key]

    def _release(self, row: int) -> None:
        self.slots.release(row)
        self.adjustments.release(row)
        self._num_logprobs.pop(row, None)

    def _move(self, move: RowMove) -> None:
        self.slots.move(move.source, move.target)
        self.adjustments.move(move.source, move.target)
        if move.source in self._num_logprobs:
            self._num_logprobs[move.target] = self._num_logprobs.pop(move.source)

    def _try_set_up(self, setup: RowSetup) -> tuple[int, str] | None:
        """(request id, what went wrong) of a request that cannot be set up; its row is padding then."""
        try:
            self._set_up(setup)
        except Exception as error:
            logger.exception("request %d could not be set up", setup.request_id)
            self._release(setup.row)
            return setup.request_id, describe_fault(error)
        return None

    def _set_up(self, setup: RowSetup) -> None:
        slots, row, sampling = self.slots, setup.row, setup.sampling
        slots.limits[row] = setup.limit
        slots.kv_lengths[row] = setup.limit  # padding for rounds until the prefill ends
        slots.depth_caps[row] = setup.depth_cap
        slots.kv_block_ids[row] = -1
        slots.granted_block_ids[row] = -1
        slots.temperatures[row] = sampling.temperature
        slots.top_k[row] = sampling.top_k
        slots.top_p[row] = sampling.top_p
        slots.min_p[row] = sampling.min_p
        slots.seeds[row] = sampling.seed - (1 << 64) if sampling.seed >= 1 << 63 else sampling.seed
        if setup.history is not None:
            self.adjustments.set_up(row, sampling, setup.history)
        if sampling.num_logprobs is not None:
            self._num_logprobs[row] = sampling.num_logprobs

    def _grant(self, grant: BlockGrant) -> None:
        ids = torch.tensor(grant.block_ids, dtype=torch.int64, device=self.device)
        self.slots.granted_block_ids[grant.row, grant.first_index : grant.first_index + len(ids)] = ids

    def _prefill(self, chunks: Sequence[PrefillChunk], results: DeviceResults, *, speculates: bool) -> None:
        """Computes the chunks; samples after those that are last."""
        if not chunks:
            return
        inputs = self._prefill_inputs(chunks)
        hidden = self.model.forward(inputs, self.pool)
        if speculates:
            self._fill_draft_cache(chunks, inputs, self.model.draft_hidden(hidden))
        firsts = [segment.first_token for segment in inputs.segments]
        last = [
            (c, first + len(c.token_ids) - 1) for c, first in zip(chunks, firsts, strict=True) if c.is_last
        ]
        if last:
            self._start_rows([chunk for chunk, _ in last], hidden[[place for _, place in last]], results)
        if any(chunk.scored_token_ids for chunk in chunks):
            results.prompt_logprobs = [
                self._score_prompt(chunk, hidden[first:]) for chunk, first in zip(chunks, firsts, strict=True)
            ]

    def _score_prompt(self, chunk: PrefillChunk, hidden: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """hidden: [tokens, hidden], from the chunk's first. The vocabulary's logits exist for a few at a time."""
        if not chunk.scored_token_ids:
            return None
        tokens = torch.split(torch.tensor(chunk.scored_token_ids, device=self.device), SCORED_AT_ONCE)
        states = torch.split(hidden[: len(chunk.scored_token_ids)], SCORED_AT_ONCE)
        scores = [score_tokens(self.model.logits(h), t) for h, t in zip(states, tokens, strict=True)]
        return chunk.num_top, torch.cat(scores)

    def _prefill_inputs(self, chunks: Sequence[PrefillChunk]) -> ForwardInputs:
        """The chunks one behind the other, one segment each."""
        size, device = self.pool.block_size, self.device
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        positions, slots, segments, first = [], [], [], 0
        for chunk in chunks:
            length = len(chunk.token_ids)
            table = self.slots.granted_block_ids[chunk.row]
            places = torch.arange(chunk.start, chunk.start + length, device=device)
            positions.append(places)
            slots.append(table[places // size] * size + places % size)
            start = torch.tensor([chunk.start], device=device)
            segments.append(Segment(first, 1, length, table[None], start))
            first += length
        return ForwardInputs(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            segments=tuple(segments),
        )

    def _fill_draft_cache(
        self, chunks: Sequence[PrefillChunk], inputs: ForwardInputs, states: torch.Tensor
    ) -> None:
        """The MTP layer sees every prompt token: slot i gets the pair (h_{i-1}, t_i); slot 0 does not exist."""
        previous = torch.zeros_like(states)
        previous[1:] = states[:-1]
        slot_mapping = inputs.slot_mapping.clone()
        for chunk, segment in zip(chunks, inputs.segments, strict=True):
            first, end = segment.first_token, segment.first_token + segment.window
            if chunk.start == 0:
                slot_mapping[first] = -1
            else:
                previous[first] = self._state_before(chunk)
            self.slots.chunk_hidden[chunk.row] = states[end - 1]
            self._keep_block_hidden(chunk, states[first:end])
        pairs = ForwardInputs(inputs.token_ids, inputs.positions, slot_mapping, inputs.segments)
        self.model.fill_draft_cache(pairs, previous, self.pool)

    def _state_before(self, chunk: PrefillChunk) -> torch.Tensor:
        if chunk.hidden_block_id is None:
            return self.slots.chunk_hidden[chunk.row]
        assert self.pool.block_hidden is not None, "a prefix hit with drafts needs block_hidden"
        return self.pool.block_hidden[chunk.hidden_block_id]

    def _keep_block_hidden(self, chunk: PrefillChunk, states: torch.Tensor) -> None:
        size = self.pool.block_size
        ends = torch.tensor(
            range(-(chunk.start + 1) % size, len(states), size), dtype=torch.int64, device=self.device
        )
        block_ids = self.slots.granted_block_ids[chunk.row, (chunk.start + ends) // size]
        self.pool.keep_hidden(block_ids, states[ends], torch.ones_like(ends, dtype=torch.bool))

    def _start_rows(
        self, chunks: Sequence[PrefillChunk], hidden: torch.Tensor, results: DeviceResults
    ) -> None:
        """The rows' prompts are in the cache: pick their first tokens and let rounds have them.

        hidden: [chunks, hidden], of the last prompt tokens.
        """
        slots = self.slots
        index = torch.tensor([chunk.row for chunk in chunks], device=self.device)
        lengths = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        length = torch.tensor(lengths, device=self.device)
        rows = slots.at(index, self.adjustments.at(index) if self.adjustments.is_used else None)
        logits = self.model.logits(hidden)
        tokens = pick_tokens(logits[:, None], rows, length, index.new_zeros((len(index), 0)))[:, 0]
        results.first_tokens = tokens
        wanted = {i: n for i, c in enumerate(chunks) if (n := self._num_logprobs.get(c.row)) is not None}
        if wanted:
            scored = torch.tensor(list(wanted), device=self.device)
            results.first_logprobs = (wanted, score_tokens(logits[scored], tokens[scored])[:, None])
        self.adjustments.count(index, tokens)
        slots.last_tokens[index] = tokens
        slots.kv_lengths[index] = length
        slots.pending_tokens[index, 0] = tokens
        slots.pending_hidden[index, 0] = self.model.draft_hidden(hidden)
        slots.pending_counts[index] = 1
        size = self.pool.block_size
        slots.last_block_offsets[index] = (length - 1) % size
        slots.block_counts[index] = counts = (length + size - 1) // size
        places = torch.arange(slots.kv_block_ids.shape[1], device=self.device)
        slots.kv_block_ids[index] = torch.where(places < counts[:, None], rows.granted_block_ids, -1)
        slots.last_block_ids[index] = rows.granted_block_ids.gather(1, counts[:, None] - 1)[:, 0]
