"""Turns plans into device work: rows of the slot table, prefill chunks, decode rounds.

Knows tensors and the model; knows nothing of requests beyond their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.batch import BlockGrant, Plan, PrefillChunk, RowSetup, StepResult
from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import ForwardInputs, Segment
from headway.engine.models.registry import CausalLM
from headway.engine.round import decode_round
from headway.engine.sampler import pick_tokens
from headway.engine.slots import SlotTable
from headway.engine.speculation.draft import Drafter, mtp_drafts


class RoundHandle:
    """The result of a launched step, perhaps still on its way from the device."""

    def __init__(self, first_tokens: torch.Tensor, emitted: torch.Tensor) -> None:
        """first_tokens: [chunks that were last] int64; emitted: [rows, depth + 2] int64, count first."""
        self._first_tokens = first_tokens.to("cpu", non_blocking=True)
        self._emitted = emitted.to("cpu", non_blocking=True)
        self._event: torch.Event | None = None
        if first_tokens.is_cuda:
            self._event = torch.Event(device="cuda")
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        """The one place where the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        emitted = tuple(tuple(row[1 : 1 + row[0]]) for row in self._emitted.tolist())
        return StepResult(first_token_ids=tuple(self._first_tokens.tolist()), emitted=emitted)


class Runner:
    """Owns the model, the KV pool and the slot table, and is the only writer of the last two on the host side."""

    def __init__(
        self, model: CausalLM, pool: KVPool, slots: SlotTable, *, drafter: Drafter = mtp_drafts
    ) -> None:
        self.model = model
        self.pool = pool
        self.slots = slots
        self.device = slots.kv_lengths.device
        self._drafter = drafter
        self._views: dict[int, SlotTable] = {}

    @torch.inference_mode()
    def launch(self, plan: Plan) -> RoundHandle:
        """Starts all the work of one step, in the order of the plan's fields."""
        for row in plan.released_rows:
            self.slots.release(row)
        for move in plan.moves:
            self.slots.move(move.source, move.target)
        for setup in plan.setups:
            self._set_up(setup)
        for grant in plan.grants:
            self._grant(grant)
        first_tokens = self._prefill(plan.prefill, speculates=plan.depth > 0)
        return RoundHandle(first_tokens, self._decode(len(plan.decode_request_ids), plan.depth))

    def _decode(self, num_rows: int, depth: int) -> torch.Tensor:
        if num_rows == 0:
            return torch.zeros((0, depth + 2), dtype=torch.int64, device=self.device)
        if num_rows not in self._views:
            self._views[num_rows] = self.slots.first(num_rows)
        return decode_round(self.model, self.pool, self._views[num_rows], depth, self._drafter)

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

    def _grant(self, grant: BlockGrant) -> None:
        ids = torch.tensor(grant.block_ids, dtype=torch.int64, device=self.device)
        self.slots.granted_block_ids[grant.row, grant.first_index : grant.first_index + len(ids)] = ids

    def _prefill(self, chunks: Sequence[PrefillChunk], *, speculates: bool) -> torch.Tensor:
        """Computes the chunks; samples after those that are last. Returns their tokens, [last chunks] int64."""
        if not chunks:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        inputs = self._prefill_inputs(chunks)
        hidden = self.model.forward(inputs, self.pool)
        if speculates:
            self._fill_draft_cache(chunks, inputs, self.model.draft_hidden(hidden))
        last = [
            (chunk, segment.first_token + segment.window - 1)
            for chunk, segment in zip(chunks, inputs.segments, strict=True)
            if chunk.is_last
        ]
        if not last:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return self._start_rows([chunk for chunk, _ in last], hidden[[place for _, place in last]])

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

    def _start_rows(self, chunks: Sequence[PrefillChunk], hidden: torch.Tensor) -> torch.Tensor:
        """The rows' prompts are in the cache: pick their first tokens and let rounds have them.

        hidden: [chunks, hidden], of the last prompt tokens. Returns [chunks] int64.
        """
        slots = self.slots
        index = torch.tensor([chunk.row for chunk in chunks], device=self.device)
        lengths = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        length = torch.tensor(lengths, device=self.device)
        rows = SlotTable(**{name: tensor[index] for name, tensor in slots.tensors().items()})
        tokens = pick_tokens(self.model.logits(hidden)[:, None], rows, length)[:, 0]
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
        return tokens
