"""A device made of lists: carries plans out token by token and raises at the first wrong access.

The KV cache holds, for each position, the token and a state that stands for all tokens up to it. Whatever
attention would read is checked, so a block that is lost, reused, overwritten or read too early shows.
The text is a function of the tokens alone: `oracle_output` says what any request must give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import MaskBuffer
from headway.engine.scheduling.plan import (
    MAX_PENDING,
    BlockGrant,
    Plan,
    PrefillChunk,
    RowSetup,
    StepResult,
)
from headway_testing.fake_masks import VOCAB_SIZE, MaskMemory, is_allowed

Masks = Callable[[int, int], bool]  # whether a place of the row's window may have this token
_MASK = (1 << 64) - 1


def next_state(state: int, token_id: int) -> int:
    """Returns the state after one more token; 0 is the state before the first."""
    mixed = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(state: int, seed: int) -> int:
    return next_state(state, seed % (1 << 32)) % VOCAB_SIZE


def picked(token_id: int, allows: Callable[[int], bool]) -> int:
    """Returns the token, or the next one that is allowed."""
    for _ in range(VOCAB_SIZE):
        if allows(token_id):
            return token_id
        token_id = (token_id + 1) % VOCAB_SIZE
    raise DeviceError("no token is allowed")


def oracle_output(
    prompt: list[int], max_tokens: int, stop: frozenset[int], seed: int, guide: Guide | None = None
) -> list[int]:
    """Returns the output of a request that runs alone, one token at a time. guide: at its beginning; it is
    used up."""
    state, output = 0, list[int]()
    for token_id in prompt:
        state = next_state(state, token_id)
    while len(output) < max_tokens and not (output and output[-1] in stop):
        token_id = next_token(state, seed)
        if guide is not None:
            token_id = picked(token_id, lambda i: is_allowed(guide, i))
            guide.advance([token_id])
        output.append(token_id)
        state = next_state(state, token_id)
    return output


class DeviceError(AssertionError):
    """Raised where a plan made the device do what must never happen."""


def require(is_met: bool, message: str) -> None:
    if not is_met:
        raise DeviceError(message)


@dataclass(slots=True)
class FakeHandle:
    """A launched step."""

    value: StepResult
    ready: Callable[[], bool]

    def is_ready(self) -> bool:
        return self.ready()

    def wait(self) -> None: ...

    def result(self) -> StepResult:
        return self.value


@dataclass(slots=True)
class FakeBegun:
    """A step whose first half is launched."""

    buffer: MaskBuffer
    proposed: list[list[int]]
    end: Callable[[Mapping[int, int]], FakeHandle]

    def drafts(self) -> list[list[int]]:
        return self.proposed

    def finish(self, entries: Mapping[int, int]) -> FakeHandle:
        return self.end(entries)


@dataclass(slots=True)
class _Row:
    """length, state: of what stands in the KV cache. last_token: None until the prefill has ended.

    num_pairs: slots 1 .. num_pairs of the MTP layer hold true pairs; the pairs up to the last token are
    pending. restored: the state that layers without a KV cache begin with.
    """

    setup: RowSetup
    block_ids: list[int] = field(default_factory=list)
    request_id: int | None = None
    length: int = 0
    state: int = 0
    last_token: int | None = None
    num_pairs: int = 0
    restored: int = 0

    @property
    def is_live(self) -> bool:
        return self.last_token is not None and self.length < self.setup.limit


@dataclass(slots=True)
class _Block:
    """kv: (token, state after it) by offset; pairs: (state before it, token); hidden: the last token's
    state."""

    kv: list[tuple[int, int] | None]
    pairs: list[tuple[int, int] | None]
    hidden: int | None = None


class FakeRunner:
    """Launches plans as the runner does; executes them at once, as a stream would in the same order.

    accept: how many of n valid drafts are right, 0 .. n. is_published: whether others may find a block.
    max_depth: the first pass of a round with drafts has room for max_depth + 1 pending pairs, a row for
    MAX_PENDING. keeps_row_state: whether layers keep state by row, which a prefix hit needs from a
    checkpoint. may_hold_rounds: whether several steps in a row may leave out all rows that could decode; else
    one may.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        has_draft_head: bool,
        max_depth: int = 0,
        accept: Callable[[int], int] = lambda num_valid: num_valid,
        is_published: Callable[[int], bool] = lambda block_id: False,
        keeps_row_state: bool = False,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.plans: list[Plan] = []
        self.may_hold_rounds = False
        self._left_out = [False, False]  # by the last step: rows that could decode, prompts
        self._size = block_size
        self._has_mtp, self._max_depth = has_draft_head, max_depth
        self._accept = accept
        self._is_published = is_published
        self._keeps_row_state = keeps_row_state
        self._checkpoints: dict[int, int] = {}
        self._ready = ready
        self._blocks = [self._empty_block() for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}
        self._owners: dict[int, _Row] = {}  # of blocks: the rows that got them last, empty
        self._is_begun = False

    def launch(self, plan: Plan) -> FakeHandle:
        require(not plan.guided_rows, f"the masks of rows {plan.guided_rows} are missing")
        drafts = self._start(plan)
        return self._end(plan, drafts, lambda row: None)

    def begin(self, plan: Plan) -> FakeBegun:
        """Launches a step. Drafts of rows beyond their own limits have no meaning."""
        require(bool(plan.guided_rows), "a step without guided rows has no halves")
        drafts = self._start(plan)
        self._is_begun = True
        memory = MaskMemory(len(self._rows) + 1, self._max_depth + 1)

        def finish(entries: Mapping[int, int]) -> FakeHandle:
            require(self._is_begun, "the step was finished before")
            self._is_begun = False
            require(set(entries) <= set(plan.guided_rows), f"{entries} of {plan.guided_rows}")

            def masks(row: int) -> Masks | None:
                return (lambda place, i: memory.allows(entries[row], place, i)) if row in entries else None

            return self._end(plan, drafts, masks)

        told = [[*of_row, *[-7] * (plan.depth - len(of_row))] for of_row in drafts]
        return FakeBegun(memory.buffer, told, finish)

    def _start(self, plan: Plan) -> list[list[int]]:
        """Changes the rows. Returns the drafts that each row of the round may have."""
        require(not self._is_begun, "the step before was not finished")
        self.plans.append(plan)
        for number in plan.released_rows:
            self._take_away(number)
        for move in plan.moves:
            require(move.target not in self._rows, f"row {move.target} is not free")
            self._rows[move.target] = self._take_away(move.source)
        for setup in plan.setups:
            require(setup.row not in self._rows, f"row {setup.row} is not free")
            restored = 0 if setup.checkpoint is None else self._checkpoints[setup.checkpoint]
            self._rows[setup.row] = _Row(setup, restored=restored)
        for grant in plan.grants:
            self._grant(grant)
        require(all(chunk.token_ids for chunk in plan.prefill), "a chunk without tokens")
        require(bool(plan.prefill) or bool(plan.decode_request_ids), "a step without work")
        self._check_turns(plan)
        rows = [self._rows.get(number) for number in range(len(plan.decode_request_ids))]
        return [self._propose(row, plan.depth) for row in rows]

    def _end(self, plan: Plan, drafts: list[list[int]], masks: Callable[[int], Masks | None]) -> FakeHandle:
        emitted = self._decode(plan, drafts, masks)
        first_tokens = self._prefill_all(plan, masks)
        require(self._keeps_row_state or not plan.saves, "no layer keeps state by row")
        for save in plan.saves:
            self._checkpoints[save.checkpoint] = self._rows[save.row].state
        return FakeHandle(StepResult(first_tokens, emitted), self._ready)

    def snapshot(self, block_id: int) -> tuple[object, ...]:
        """Returns all that the block holds, to be compared later."""
        block = self._blocks[block_id]
        return (tuple(block.kv), tuple(block.pairs), block.hidden)

    def is_complete(self, block_id: int, *, with_draft_head: bool) -> bool:
        """Tells whether the block can serve as part of a prefix: it has every token, every true pair and the
        last state."""
        block = self._blocks[block_id]
        before: int | None = None
        for kv, pair in zip(block.kv, block.pairs, strict=True):
            if kv is None or (before is not None and next_state(before, kv[0]) != kv[1]):
                return False
            starts_request = before is None and next_state(0, kv[0]) == kv[1]
            is_true_pair = pair is not None and pair[1] == kv[0] and next_state(*pair) == kv[1]
            if with_draft_head and not starts_request and not is_true_pair:
                return False
            before = kv[1]
        return block.hidden == before

    # --- rows ------------------------------------------------------------------------------------------

    def _take_away(self, number: int) -> _Row:
        require(number in self._rows, f"row {number} holds no request")
        return self._rows.pop(number)

    def _grant(self, grant: BlockGrant) -> None:
        """Adds blocks after the row's, or replaces some that it has not reached: these may be others' by
        now."""
        row = self._rows[grant.row]
        is_behind = -(-row.length // self._size) <= grant.first_index <= len(row.block_ids)
        require(is_behind, f"{grant} does not continue {row.block_ids}, length {row.length}")
        if grant.first_index > 0:
            self._wipe(grant.block_ids)
        row.block_ids[grant.first_index :] = grant.block_ids
        self._owners |= {b: row for b in grant.block_ids if not self._is_published(b)}

    def _wipe(self, block_ids: tuple[int, ...] | list[int]) -> None:
        """Empties blocks that are new to a row, and asserts that they are not published."""
        for block_id in block_ids:
            require(not self._is_published(block_id), f"block {block_id} is new to a row, but published")
            self._blocks[block_id] = self._empty_block()

    def _empty_block(self) -> _Block:
        return _Block([None] * self._size, [None] * self._size)

    # --- work ------------------------------------------------------------------------------------------

    def _prefill_all(self, plan: Plan, masks: Callable[[int], Masks | None]) -> tuple[int, ...]:
        """Returns the first tokens of the chunks that are last."""
        fills_drafts = self._max_depth > 0
        tokens = (self._prefill(c, masks(c.row), fills_drafts=fills_drafts) for c in plan.prefill)
        return tuple(token for token in tokens if token is not None)

    def _prefill(self, chunk: PrefillChunk, masks: Masks | None, *, fills_drafts: bool) -> int | None:
        """Returns the first token after a last chunk."""
        row = self._rows[chunk.row]
        if row.request_id is None:
            self._open(row, chunk, fills_drafts=fills_drafts)
        else:
            require(row.request_id == chunk.request_id, f"row {chunk.row} is not of {chunk.request_id}")
            require(chunk.hidden_block_id is None, "the row itself knows the state before its chunk")
        require(row.length == chunk.start, f"chunk starts at {chunk.start}, the row ends at {row.length}")
        require(row.last_token is None, f"row {chunk.row} is prefilled already")
        require(self._read(row, row.length) == row.state, f"row {chunk.row} reads what it did not write")
        for token_id in chunk.token_ids:
            if fills_drafts and row.length > 0:
                self._write_pair(row, row.length, row.state, token_id)
            row.state = next_state(row.state, token_id)
            self._write(row, row.length, token_id, row.state)
            row.length += 1
        row.num_pairs = row.length - 1
        if not chunk.is_last:
            return None
        row.last_token = self._pick(row, row.state, masks, 0)
        return row.last_token

    def _pick(self, row: _Row, state: int, masks: Masks | None, place: int) -> int:
        token_id = next_token(state, row.setup.sampling.seed)
        return token_id if masks is None else picked(token_id, lambda i: masks(place, i))

    def _open(self, row: _Row, chunk: PrefillChunk, *, fills_drafts: bool) -> None:
        """Starts a request with its first chunk; the tokens before it come from the prefix cache."""
        require(chunk.start % self._size == 0, f"a hit of {chunk.start} tokens ends within a block")
        row.request_id, row.length = chunk.request_id, chunk.start
        num_hits = chunk.start // self._size
        self._wipe(row.block_ids[num_hits:])
        row.state = self._read(row, chunk.start)
        is_state_right = row.restored == (row.state if self._keeps_row_state else 0)
        require(is_state_right, f"request {chunk.request_id} goes on from the row state of another prefix")
        must_name = self._has_mtp and num_hits > 0
        require((chunk.hidden_block_id is not None) == must_name, f"{chunk.hidden_block_id=}, {num_hits=}")
        if chunk.hidden_block_id is not None:
            hidden = self._blocks[chunk.hidden_block_id].hidden
            require(hidden == row.state, f"block {chunk.hidden_block_id} keeps another state")
        if fills_drafts:
            self._read_pairs(row, chunk.start - 1)

    def _check_turns(self, plan: Plan) -> None:
        """Asserts that neither rows that could decode nor prompts are left out of two steps in a row."""
        rows = self._rows.values()
        holds_round = not plan.decode_request_ids and any(row.is_live for row in rows)
        holds_prompts = not plan.prefill and any(row.last_token is None for row in rows)
        left_out = [holds_round and not self.may_hold_rounds, holds_prompts]
        for kind, now, before in zip(("rounds", "prompts"), left_out, self._left_out, strict=True):
            require(not (now and before), f"{kind} were left out of two steps in a row")
        self._left_out = left_out

    def _decode(
        self, plan: Plan, drafts: list[list[int]], masks: Callable[[int], Masks | None]
    ) -> tuple[tuple[int, ...], ...]:
        ids = plan.decode_request_ids
        if not ids:
            return ()
        for number, row in self._rows.items():
            listed = ids[number] if number < len(ids) else None
            is_right = listed == row.request_id if row.is_live or listed is not None else True
            require(is_right, f"row {number} of request {row.request_id} is listed as {listed}")
        for number, request_id in enumerate(ids):
            row_or_none = self._rows.get(number)
            is_prefilled = row_or_none is not None and row_or_none.last_token is not None
            require(request_id is None or is_prefilled, f"row {number} is not ready for request {request_id}")
        rows = [self._rows.get(number) for number in range(len(ids))]
        if plan.catches_up:
            for row in rows:
                if row is not None and row.is_live:
                    self._fill_pending(row, row.length - 1)
        numbered = enumerate(zip(rows, drafts, strict=True))
        return tuple(self._round(row, plan.depth, of_row, masks(i)) for i, (row, of_row) in numbered)

    def _propose(self, row: _Row | None, depth: int) -> list[int]:
        """Returns as many right drafts as are to be accepted where nothing is masked, then wrong ones."""
        if row is None or not row.is_live:
            return []
        num_valid = max(0, min(depth, row.setup.depth_cap, row.setup.limit - row.length - 1))
        num_accepted = self._accept(num_valid)
        require(0 <= num_accepted <= num_valid, f"{num_accepted} of {num_valid} drafts accepted")
        drafts = self._true_tokens(row, num_valid)
        return [
            token_id if i < num_accepted else (token_id + 1) % VOCAB_SIZE for i, token_id in enumerate(drafts)
        ]

    def _round(self, row: _Row | None, depth: int, drafts: list[int], masks: Masks | None) -> tuple[int, ...]:
        if row is None or not row.is_live:
            return ()
        start, limit = row.length, row.setup.limit
        require(self._read(row, start) == row.state, f"request {row.request_id} reads what it did not write")
        if depth > 0:
            self._draft(row, depth)
        elif self._max_depth > 0:
            num_pending = start - row.num_pairs + 1
            require(num_pending <= MAX_PENDING, f"request {row.request_id} has {num_pending} pending pairs")
        emitted = self._verified(row, drafts, masks)
        self._write_window(row, emitted, min(depth + 1, limit - start))
        for token_id in emitted:
            assert row.last_token is not None
            row.state = next_state(row.state, row.last_token)
            row.last_token = token_id
        row.length += len(emitted)
        return tuple(emitted)

    def _draft(self, row: _Row, depth: int) -> None:
        """Computes the pass over the pending pairs, then writes rubbish where the single steps write."""
        assert row.last_token is not None
        start = row.length
        num_pending = start - row.num_pairs
        require(num_pending <= self._max_depth + 1, f"{num_pending} pending pairs at depth {depth}")
        self._fill_pending(row, start)
        self._read_pairs(row, start)
        for position in range(start + 1, min(start + depth, row.setup.limit)):
            self._write_pair(row, position, -position, -1)

    def _fill_pending(self, row: _Row, last: int) -> None:
        """Writes the pending pairs of slots up to `last`."""
        state = self._read(row, row.num_pairs)
        for position in range(row.num_pairs, last + 1):
            token_id = row.last_token if position == row.length else self._slot(row, position)[0]
            assert token_id is not None
            if position > row.num_pairs:
                self._write_pair(row, position, state, token_id)
            state = next_state(state, token_id)
        row.num_pairs = max(row.num_pairs, last)

    def _verified(self, row: _Row, drafts: list[int], masks: Masks | None) -> list[int]:
        """Returns the drafts up to the first that is not the token of its position, then that token."""
        assert row.last_token is not None
        state, emitted = next_state(row.state, row.last_token), list[int]()
        for place in range(len(drafts) + 1):
            emitted.append(self._pick(row, state, masks, place))
            state = next_state(state, emitted[-1])
            if place < len(drafts) and drafts[place] != emitted[-1]:
                break
        return emitted

    def _true_tokens(self, row: _Row, count: int) -> list[int]:
        assert row.last_token is not None
        state, tokens = next_state(row.state, row.last_token), list[int]()
        for _ in range(count):
            tokens.append(next_token(state, row.setup.sampling.seed))
            state = next_state(state, tokens[-1])
        return tokens

    def _write_window(self, row: _Row, emitted: list[int], width: int) -> None:
        """Writes t_L and the drafts: the right ones that stay, then wrong ones."""
        assert row.last_token is not None
        window = [row.last_token, *emitted[:-1], (emitted[-1] + 1) % VOCAB_SIZE]
        window += [VOCAB_SIZE] * width
        state = row.state
        for place in range(width):
            state = next_state(state, window[place])
            self._write(row, row.length + place, window[place], state)

    # --- memory ----------------------------------------------------------------------------------------

    def _place(self, row: _Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._size)
        require(
            index < len(row.block_ids),
            f"request {row.request_id} is at position {position}, but has {len(row.block_ids)} blocks",
        )
        return row.block_ids[index], offset

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        block_id, offset = self._place(row, position)
        content = self._blocks[block_id].kv[offset]
        require(content is not None, f"request {row.request_id} reads position {position}, never written")
        assert content is not None
        return content

    def _read(self, row: _Row, length: int) -> int:
        """Returns the state after the first `length` tokens; asserts that each continues the one before."""
        state = 0
        for position in range(length):
            token_id, stored = self._slot(row, position)
            state = next_state(state, token_id)
            require(state == stored, f"request {row.request_id} reads a foreign token at {position}")
        return state

    def _read_pairs(self, row: _Row, last: int) -> None:
        """Asserts that slots 1 .. last of the MTP layer hold true pairs."""
        state = 0
        for position in range(last + 1):
            token_id = row.last_token if position == row.length else self._slot(row, position)[0]
            assert token_id is not None
            block_id, offset = self._place(row, position)
            is_true = position == 0 or self._blocks[block_id].pairs[offset] == (state, token_id)
            require(is_true, f"request {row.request_id} reads a wrong MTP pair in slot {position}")
            state = next_state(state, token_id)

    def _write(self, row: _Row, position: int, token_id: int, state: int) -> None:
        block, offset = self._writable(row, position)
        block.kv[offset] = (token_id, state)
        if offset == self._size - 1:
            block.hidden = state

    def _write_pair(self, row: _Row, position: int, state: int, token_id: int) -> None:
        block, offset = self._writable(row, position)
        block.pairs[offset] = (state, token_id)

    def _writable(self, row: _Row, position: int) -> tuple[_Block, int]:
        block_id, offset = self._place(row, position)
        require(position < row.setup.limit, f"request {row.request_id} writes at its limit, {position}")
        owner = self._owners.get(block_id)
        require(owner is row, f"request {row.request_id} writes block {block_id} of {owner}")
        require(not self._is_published(block_id), f"block {block_id} is written, but published")
        return self._blocks[block_id], offset
