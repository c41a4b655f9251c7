"""The parts of a plan that concern one request, made from what the scheduler has decided."""

from __future__ import annotations

from headway.engine.scheduling.plan import BlockGrant, PrefillChunk, RowSetup, TokenHistory
from headway.engine.scheduling.request import Request


def row_of(request: Request) -> int:
    assert request.row is not None, f"request {request.request_id} has no row"
    return request.row


def history_of(request: Request) -> TokenHistory | None:
    if not request.sampling.adjusts_logits:
        return None
    stop = tuple(sorted(request.stop_token_ids))
    return TokenHistory(tuple(request.prompt_token_ids), tuple(request.output_token_ids), stop)


def row_setup(request: Request, history: TokenHistory | None, depth_cap: int) -> RowSetup:
    row = row_of(request)
    return RowSetup(request.request_id, row, request.sampling, request.limit, depth_cap, history)


def block_grant(request: Request, first_index: int) -> BlockGrant:
    return BlockGrant(row_of(request), first_index, tuple(request.block_ids[first_index:]))


def next_chunk(request: Request, budget: int, hidden_block_id: int | None) -> PrefillChunk:
    """Up to `budget` tokens from num_computed on; their hidden states score the prompt's tokens behind them."""
    start = request.num_computed
    end = min(start + budget, request.num_tokens)
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
    )
