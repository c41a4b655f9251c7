"""The values exchanged between scheduler and runner in one step: an immutable plan, then a result.

A step is: row moves, row set-ups, grants, then one forward pass of prefill chunks, of a decode round over the
rows [0, num_rows) in which `decode_request_ids` names the live ones, or of both (a mixed batch). Only ids and
numbers, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.protocol.drafters import MAX_PREDICTION
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.protocol.stats import StageSeconds
from headway.engine.scheduling.depth.costs import RoundLoad
from headway.engine.scheduling.request import Request

# The most pairs of a row that may wait for the drafter; a round without drafts adds one. They take 0.5 MiB a
# row for a 7B model.
MAX_PENDING = 64
# The value of RowSetup.reasoning for a row whose drafts are verified exactly.
NO_REASONING = (0, -1, -1)


@dataclass(frozen=True, slots=True)
class RowMove:
    """The whole state of row `source` goes to row `target` (free until then); `source` becomes free."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of a request that logits processors need when it gets a row."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A request gets a row. Until its prefill ends the row is padding for decode rounds.

    depth_cap: the most drafts of the row in any round. history: given iff sampling.adjusts_logits.
    checkpoint: the checkpoint of the prefix hit from which the row's recurrent state starts; None: it starts
    from zero. prediction_token_ids: the predicted output. joins_ngrams: see Request. reasoning: see
    `reasoning_of`.
    """

    request_id: int
    row: int
    sampling: SamplingParams
    limit: int
    depth_cap: int
    history: TokenHistory | None = None
    checkpoint: int | None = None
    num_prompt_tokens: int = 0
    prediction_token_ids: tuple[int, ...] = ()
    joins_ngrams: bool = True
    reasoning: tuple[int, int, int] = NO_REASONING


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """The row's state is copied to the checkpoint after the step's pass."""

    row: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Grants blocks to a row: entries [first_index, first_index + len) of its block table."""

    row: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(token_ids)) of a request are computed and enter the KV cache.

    hidden_block_id: the block that stores the hidden state of token start - 1, for the first chunk after a
    prefix hit; None if start is 0 or the chunk continues the row's previous one. is_last: a token is sampled
    after this chunk, and the row takes part in rounds from the next step on. is_generated: the tokens were
    generated before the request was preempted. It is set only where prompts are cut on a grid (see
    `chunk_end`), so that no chunk has tokens of both kinds; elsewhere it is False. scored_token_ids: the
    prompt's tokens start + 1, start + 2, ... whose log-probabilities are wanted, each with those of num_top
    tokens.
    """

    request_id: int
    row: int
    start: int
    token_ids: tuple[int, ...]
    hidden_block_id: int | None
    is_last: bool
    scored_token_ids: tuple[int, ...] = ()
    num_top: int = 0
    is_generated: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, which is executed in the order of the fields. Chunks and round share one forward pass if both
    are given.

    released_rows: rows whose request ended or was preempted; they become padding. wiped_block_ids: unused
    blocks that hold NaN; they are zeroed first, since 0 * NaN is NaN. decode_request_ids: the request of each
    row of the round, None for padding; () without a round. Its length is the number of active rows R; rows of
    this step's chunks are never in it. depth: the depth of the deepest row of the round. load: the load of
    the round for the depth policy; None without a round or a policy, and for audits. catches_up: the drafter
    first processes the tokens that rounds without drafts have left pending in the rows of the round. saves:
    checkpoints that are saved after the pass, for models with recurrent state. guided_rows: rows of the round
    and of last chunks whose next tokens a grammar restricts. A step with guided rows runs in two halves, and
    its masks are filled between them.
    """

    step: int
    depth: int
    released_rows: tuple[int, ...] = ()
    moves: tuple[RowMove, ...] = ()
    setups: tuple[RowSetup, ...] = ()
    grants: tuple[BlockGrant, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode_request_ids: tuple[int | None, ...] = ()
    wiped_block_ids: tuple[int, ...] = ()
    catches_up: bool = False
    saves: tuple[CheckpointSave, ...] = ()
    guided_rows: tuple[int, ...] = ()
    load: RoundLoad | None = None

    @property
    def is_mixed(self) -> bool:
        """Returns whether prompt tokens share the round's forward pass."""
        return bool(self.prefill) and bool(self.decode_request_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step on the device.

    first_token_ids: one for each chunk of the plan with is_last, in the plan's order. emitted: by row of the
    round, the tokens that stay (accepted drafts, then the bonus token); empty for padding rows.
    first_logprobs, emitted_logprobs: one for each token, None where not requested; () if no request asked for
    any. prompt_logprobs: one for each chunk of the plan, None where no tokens were scored; () if none were in
    any chunk. faults: the request id and a description for each request whose row could not be set up; the
    row is padding.
    """

    first_token_ids: tuple[int, ...] = ()
    emitted: tuple[tuple[int, ...], ...] = ()
    first_logprobs: tuple[TokenLogprobs | None, ...] = ()
    emitted_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    seconds: StageSeconds = field(default_factory=StageSeconds)
    num_graph_replays: int = 0


def row_of(request: Request) -> int:
    """Returns the request's row; it must have one."""
    assert request.row is not None, f"request {request.request_id} has no row"
    return request.row


def history_of(request: Request) -> TokenHistory | None:
    """Returns the tokens of the request that logits processors need, or None if it uses no processors."""
    if not request.sampling.adjusts_logits:
        return None
    stop = tuple(sorted(request.stop_token_ids))
    return TokenHistory(tuple(request.prompt_token_ids), tuple(request.output_token_ids), stop)


def reasoning_of(request: Request) -> tuple[int, int, int]:
    """Returns the phase of the request's reasoning after its output so far, and the ids that begin and end
    the reasoning, for the kernel `relax_acceptance`. The rule sees raw logits only, so that it is off where
    logits are adjusted or masked."""
    span = request.sampling.relaxed_thinking
    if span is None or request.sampling.adjusts_logits or request.guide is not None:
        return NO_REASONING
    output, start = request.output_token_ids, -1 if span.start_id is None else span.start_id
    phase = 1 if span.start_id is None else 2
    if phase == 2 and output:
        phase = int(output[0] == start)
    if phase == 1 and span.end_id in output:
        phase = 0
    return phase, start, span.end_id


def row_setup(
    request: Request, history: TokenHistory | None, depth_cap: int, checkpoint: int | None
) -> RowSetup:
    """Returns the set-up of the request's row."""
    row = row_of(request)
    return RowSetup(
        request.request_id,
        row,
        request.sampling,
        request.limit,
        depth_cap,
        history,
        checkpoint,
        num_prompt_tokens=len(request.prompt_token_ids),
        prediction_token_ids=request.prediction_token_ids[:MAX_PREDICTION],
        joins_ngrams=request.joins_ngrams,
        reasoning=reasoning_of(request),
    )


def block_grant(request: Request, first_index: int) -> BlockGrant:
    """Returns the grant of the request's blocks from first_index on."""
    return BlockGrant(row_of(request), first_index, tuple(request.block_ids[first_index:]))


def chunk_end(request: Request, budget: int, grid: int | None) -> int:
    """Returns the position at which the request's next chunk of at most `budget` tokens ends; num_computed if
    there is none.

    grid: chunks of the prompt begin at its multiples, and end there or with the prompt; generated tokens have
    chunks of their own. None: chunks may end anywhere.
    """
    start, length = request.num_computed, len(request.prompt_token_ids)
    end = min(start + budget, request.num_tokens)
    if grid is None or start >= length or end == length:
        return end
    return length if end > length else end // grid * grid


def next_chunk(
    request: Request, end: int, hidden_block_id: int | None, *, is_generated: bool = False
) -> PrefillChunk:
    """Returns the chunk of the tokens from num_computed to end. Its hidden states score the prompt tokens
    that follow."""
    start = request.num_computed
    scored = request.prompt_token_ids[start + 1 : end + 1] if request.scores_prompt else []
    return PrefillChunk(
        request.request_id,
        row_of(request),
        start,
        tuple(request.token_ids(start, end)),
        hidden_block_id,
        is_last=end == request.num_tokens,
        scored_token_ids=tuple(scored),
        num_top=request.sampling.num_prompt_logprobs or 0,
        is_generated=is_generated,
    )
