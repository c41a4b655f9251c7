"""Plans steps: row growth and admission, then prefill chunks, one decode round for all rows, or both in one
forward pass.

Step n + 1 is planned before the result of step n is read, so that the progress of a row is only bounded from
above. Knows ids and numbers, no tensors and no text. The clock serves only to measure how long a request
queued.

    N      tokens known: prompt + output
    L      tokens in the KV cache: N - 1 once prefilled, the last one is not in it
    limit  prompt + max_tokens - 1: no position at or beyond it is computed or written
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from headway.engine.grammar.masks import MaskBuffer, MaskFiller
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DrafterTraits
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import EngineStats
from headway.engine.scheduling.admission import Admission
from headway.engine.scheduling.block_supply import BlockSupply
from headway.engine.scheduling.depth.policy import DepthPolicy
from headway.engine.scheduling.limits import Limits
from headway.engine.scheduling.plan import (
    NO_REASONING,
    CheckpointSave,
    Plan,
    PrefillChunk,
    StepResult,
    block_grant,
    chunk_end,
    next_chunk,
    reasoning_of,
    row_of,
    row_setup,
)
from headway.engine.scheduling.prefill_policy import (
    DEFAULT_CHUNK,
    MOST_OF_ALL,
    Load,
    PrefillPolicy,
    long_gaps_after,
)
from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.result_reader import ResultReader
from headway.engine.scheduling.rounds import Masking, RoundDepth, count_pending, join_round
from headway.engine.scheduling.scheduler_state import new_state
from headway.engine.scheduling.updates import fault_event


class Scheduler:
    """Mutable: owns the requests, the blocks and the rows. Only the loop calls it.

    At most one step may be unread when `plan` is called. prefill: by default it allows DEFAULT_CHUNK prompt
    tokens in each step. num_checkpoints: the number of copies of row state for prefix hits; None: the model's
    layers have no row state. prompt_grid: see ModelSpec.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        drafter: DrafterTraits,
        prefill: PrefillPolicy | None = None,
        num_checkpoints: int | None = None,
        prompt_grid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_blocks * config.block_size >= max_model_len, (
            f"{num_blocks} blocks of {config.block_size} tokens cannot hold one request of {max_model_len}"
        )
        self._config = config
        self._limits = Limits(max_model_len, vocab_size)
        self._prefill = prefill or PrefillPolicy.uniform(
            config.prefill_chunk or DEFAULT_CHUNK, mixed_above_tokens=config.mixed_above_tokens
        )
        assert prompt_grid is None or self._prefill.least_tokens >= prompt_grid, (
            f"steps of {self._prefill.least_tokens} prompt tokens are shorter than a grid of {prompt_grid}"
        )
        self._prompt_grid = prompt_grid
        self._drafter = drafter
        self._is_turn_of_round = False
        self._num_long_gaps = 0.0
        # Since when prompts have filled every step, by the clock; None where the last one had room for more.
        self._full_since: float | None = None
        self._step = 0
        self._num_taken_in = 0
        self.state = new_state(
            config,
            num_blocks=num_blocks,
            depth=config.depth if drafter.has_drafts else 0,
            drafter=drafter,
            num_checkpoints=num_checkpoints,
            prompt_grid=prompt_grid,
            clock=clock,
        )
        self.supply = BlockSupply(self.state, num_blocks)
        self._admission = Admission(
            self.state,
            self.supply,
            max_extra_rows=config.max_extra_rows or config.num_rows,
            counts_prefix_queries=config.prefix_caching,
        )
        self._reader = ResultReader(self.state)
        self._depth = RoundDepth(self.state, config)
        self._masking = Masking(self.state, MaskFiller(), vocab_size=vocab_size)

    @property
    def has_work(self) -> bool:
        return bool(self.state.requests)

    @property
    def num_rows(self) -> int:
        return self._config.num_rows

    @property
    def num_kv_tokens(self) -> int:
        """Returns the number of tokens for which the KV cache has room."""
        return self.state.stats.num_kv_blocks * self._config.block_size

    @property
    def num_requests(self) -> int:
        """Returns how many requests run or wait, audits not counted."""
        return len(self.state.requests) - self.state.num_audits

    @property
    def num_running(self) -> int:
        """Returns how many requests hold a row, audits not counted."""
        return len(self.state.running) - len(self._running_audits())

    @property
    def num_waiting(self) -> int:
        """Returns how many requests wait for a row, audits not counted."""
        return self.num_requests - self.num_running

    def snapshot(self) -> EngineStats:
        """Returns a copy of the counters as they stand."""
        stats, blocks = self.state.stats, self.state.blocks
        stats.num_requests_running = self.num_running
        stats.num_requests_waiting = self.num_waiting
        of_audits = sum(len(request.block_ids) for request in self._running_audits())
        stats.num_kv_blocks_used = blocks.num_used - of_audits
        stats.num_kv_blocks_cached = blocks.num_cached
        return copy.deepcopy(stats)

    def set_depth(self, depth: int) -> None:
        """Sets the depth of rounds from the next step on, at most the configured one; where a policy chooses,
        it sets the upper limit. Requests may be running: the drafter catches up with rounds without drafts
        before it drafts again."""
        assert 0 <= depth <= self.state.max_depth, f"depth is {depth}"
        self.state.depth = self.state.depth_limit = depth

    def fix_depth(self, depth: int | None) -> None:
        """Gives each round from the next step on exactly this depth, also where a policy would choose. None
        lets the policy choose again, up to the configured depth. Requests may be running."""
        self._depth.is_fixed = depth is not None
        self.set_depth(self.state.max_depth if depth is None else depth)

    def set_depth_policy(self, policy: DepthPolicy) -> None:
        """Reports all rounds to the policy from now on, and lets it choose their depths if the configuration
        says so. No request has come yet."""
        assert not self.state.requests, "requests run that the policy was not told of"
        self.state.depth_policy = policy

    def hold_rounds(self) -> None:
        """Plans only prompts until `release_rounds`, so that all rows of a measurement begin their rounds
        together."""
        self.state.holds_rounds = True

    def release_rounds(self) -> None:
        """Plans rounds again from the next step on."""
        self.state.holds_rounds = False

    @property
    def prefill(self) -> PrefillPolicy:
        """The policy by which prompts are cut into chunks."""
        return self._prefill

    def set_prefill(self, policy: PrefillPolicy) -> None:
        """Sets the policy from the next step on. Its steps must be no larger than those of the policy that
        the engine was built with, for which memory is reserved."""
        self._prefill = policy

    def preempt(self, request_id: int, *, forgets_blocks: bool = False) -> bool:
        """Preempts a request between two steps, as a lack of blocks would. A check of exactness does so at
        chosen places.

        forgets_blocks: the request finds none of its blocks in the prefix cache afterwards. Returns False
        where the request does not run.
        """
        request = self.state.requests.get(request_id)
        if request is None or request not in self.state.running:
            return False
        if forgets_blocks:
            self.state.blocks.unpublish(request.block_ids)
        self.state.preempt(request)
        return True

    def add(self, request: Request) -> None:
        """Puts a request in the queue, after its equals. Raises RequestError, or QueueFullError.

        The caller has cut max_tokens so that prompt + max_tokens <= max_model_len. Only a scored prompt,
        whose one generated token is not shown, may fill the whole context.
        """
        state = self.state
        self._limits.check(request)
        if not (request.is_audit or request.is_replay):
            state.waiting.check_room(request)
        assert request.max_tokens >= 1, f"max_tokens is {request.max_tokens}"
        max_model_len = self._limits.max_model_len
        fits = request.limit < max_model_len or request.max_tokens == 1
        assert fits, f"limit {request.limit} of {max_model_len} tokens"
        assert request.request_id not in state.requests, f"request id {request.request_id} is taken"
        others = self.num_requests if request.is_audit else state.num_audits
        assert not others, (
            f"request {request.request_id} would be computed beside {others} of the other kind, audits or not"
        )
        request.arrival_seconds = state.clock()
        request.arrival = self._num_taken_in
        self._num_taken_in += 1
        state.requests[request.request_id] = request
        state.num_audits += request.is_audit
        if self._config.relaxed_thinking is not None and not request.is_replay:
            state.stats.num_lossy_requests += reasoning_of(request) != NO_REASONING
        state.waiting.append(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request in any status and counts it under `reason`. Tokens of a step in flight are
        dropped."""
        request = self.state.requests.get(request_id)
        if request is not None:
            self.state.finish(request, reason)

    def count_fault(self, request_id: int, what: str) -> None:
        """Counts a request that an internal error ended; its event waits for `drain_faults`."""
        self.state.stats.count_finished(FinishReason.ERROR.value)
        self.state.fault_events.append(fault_event(request_id, what))

    def drain_faults(self) -> list[TokenEvent]:
        """Returns the events of requests that faults have ended since the last call."""
        events, self.state.fault_events = self.state.fault_events, []
        return events

    def update(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Processes the result of a step; see `ResultReader`. Steps come in the order of their plans. Faults
        are reported by `drain_faults`."""
        return self._reader.read(plan, result)

    def fill_masks(self, plan: Plan, drafts: Sequence[Sequence[int]], buffer: MaskBuffer) -> dict[int, int]:
        """Fills the masks of a step with guided rows, once the results of all steps before it were processed;
        see `Masking.fill`."""
        return self._masking.fill(plan, drafts, buffer)

    def plan(self) -> Plan | None:
        """Returns the next step, or None when there is nothing to compute before a step in flight is read."""
        state = self.state
        self._choose_depth()
        first_new_blocks = self.supply.grow_rows()
        admitted = []
        if state.waiting:
            self._admission.make_room(self._budget())
            admitted = self._admission.admit(self._budget())
        if not any(r.status is Status.PREFILLING or state.can_decode(r) for r in state.running):
            return None
        moves = state.rows.compact()
        released = (
            state.rows.drain_released()
        )  # a row that is released later stays padding until the next step
        prefixes = state.prefixes
        setups = tuple(
            row_setup(r, history, state.own_cap(r), prefixes.checkpoint(r)) for r, history in admitted
        )
        served = [
            (r, first) for r, first in first_new_blocks if r.row is not None
        ]  # the others were preempted after that
        grants = tuple(block_grant(r, first) for r, first in [*served, *((r, 0) for r, _ in admitted)])
        chunks, decoding = self._next_pass()
        saves = tuple(save for chunk in chunks if (save := self._note_chunk(chunk)) is not None)
        depth, decode_request_ids = join_round(state, decoding)
        catches_up = count_pending(state, decoding, depth)
        self._step += 1
        state.stats.num_steps += 1
        broken, state.broken_block_ids = state.broken_block_ids, []
        return Plan(
            self._step,
            depth,
            released,
            moves,
            setups,
            grants,
            tuple(chunks),
            decode_request_ids,
            catches_up=catches_up,
            wiped_block_ids=tuple(broken),
            saves=saves,
            guided_rows=self._guided_rows(decoding, chunks),
            load=self._depth.begin_round(decoding, chunks),
        )

    def _running_audits(self) -> list[Request]:
        return (
            [request for request in self.state.running if request.is_audit] if self.state.num_audits else []
        )

    def _choose_depth(self) -> None:
        """Chooses the depth of the step's round, unless prompts have their turn."""
        state, mixes = self.state, self._prefill.mixed_above_tokens is not None
        has_prompts = bool(state.waiting) or any(r.status is Status.PREFILLING for r in state.running)
        if mixes or self._is_turn_of_round or not has_prompts:
            self._depth.choose(self._prefill.mixed if has_prompts and mixes else 0)

    def _guided_rows(self, decoding: list[Request], chunks: list[PrefillChunk]) -> tuple[int, ...]:
        last = [self.state.requests[chunk.request_id] for chunk in chunks if chunk.is_last]
        return tuple(row_of(request) for request in (*decoding, *last) if request.guide is not None)

    def _budget(self) -> int:
        """Returns the most prompt tokens of this step."""
        budget = self._prefill.budget(self._load([r for r in self.state.running if self.state.can_decode(r)]))
        # A request that arrives during an audit waits for its step, so that such steps are kept short.
        return min(budget, self._prefill.separate) if self.state.num_audits else budget

    def _load(self, decoding: list[Request]) -> Load:
        """Returns the load that the policy decides by: a round of these rows, and the waiting prompts."""
        state, prefilling = self.state, self.state.prefilling()
        depth = max(map(state.depth_cap, decoding), default=-1)
        return Load(
            len(decoding) * (depth + 1),
            state.is_plain(),
            num_keys=prefilling[0].num_computed if prefilling else 0,
            seconds_full=0.0 if self._full_since is None else state.clock() - self._full_since,
            num_rows=len(decoding),
            num_waiting=len(prefilling) + min(len(state.waiting), state.rows.num_free),
            most_long_gaps=max((request.num_long_gaps for request in decoding), default=0.0),
            num_long_gaps=self._num_long_gaps,
        )

    def _next_pass(self) -> tuple[list[PrefillChunk], list[Request]]:
        """Returns the chunks and the decoding rows of the step's forward pass.

        Where chunks and rows may not share a pass, they take turns. A row joins rounds in the step after the
        one that ends its prompt.
        """
        decoding = [request for request in self.state.running if self.state.can_decode(request)]
        chunks = self._next_chunks()
        streams, mixes, is_long = decoding, False, False
        if chunks and decoding:
            load = self._load(decoding)
            mixes = self._prefill.mixes(chunks, load)
            if not mixes and self._is_turn_of_round:
                chunks = []
            elif not mixes:
                decoding, is_long = [], self._prefill.delays(chunks, load)
        self._is_turn_of_round = bool(chunks) and not mixes
        if decoding or is_long or not streams:
            owed = long_gaps_after(self._num_long_gaps, len(streams), is_long=is_long)
            self._num_long_gaps = min(owed, MOST_OF_ALL * len(streams))
            for request in streams:
                if is_long or request.num_long_gaps > 0:
                    request.num_long_gaps = long_gaps_after(request.num_long_gaps, 1, is_long=is_long)
        return chunks, decoding

    def _next_chunks(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        prefilling = self.state.prefilling()
        budget = self._budget() if prefilling else 0
        for request in prefilling:
            if budget > 0:
                num_before = len(chunks)
                self.state.contain(self._add_chunk, request, budget, chunks)
                budget -= sum(len(chunk.token_ids) for chunk in chunks[num_before:])
        if not prefilling or budget >= (self._prompt_grid or 1):
            self._full_since = None
        elif self._full_since is None:
            self._full_since = self.state.clock()
        return chunks

    def _add_chunk(self, request: Request, budget: int, chunks: list[PrefillChunk]) -> None:
        follows_hit = self._drafter.has_drafts and 0 < request.num_computed == request.num_cached
        last_hit = request.num_computed // self.state.block_size - 1
        if (border := self.state.prefixes.next_border(request)) is not None:
            budget = min(budget, border - request.num_computed)
        start, end = request.num_computed, chunk_end(request, budget, self._prompt_grid)
        if end > start:
            is_generated = self._prompt_grid is not None and start >= len(request.prompt_token_ids)
            hidden_block_id = request.block_ids[last_hit] if follows_hit else None
            chunks.append(next_chunk(request, end, hidden_block_id, is_generated=is_generated))

    def _note_chunk(self, chunk: PrefillChunk) -> CheckpointSave | None:
        """Updates the request of a chunk of the step. Returns the checkpoint that is saved after the chunk,
        if any."""
        request = self.state.requests[chunk.request_id]
        request.num_computed += len(chunk.token_ids)
        request.num_chunks_in_flight += 1
        if chunk.is_last:
            request.status = Status.RUNNING
            request.num_pending = 1
            self._depth.begin(request)
        checkpoint = self.state.prefixes.take_checkpoint(request)
        return None if checkpoint is None else CheckpointSave(chunk.row, checkpoint)
