"""Expands the target's inputs to those of a drafter that drafts several tokens in one pass."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_padding_slots
from headway.kernels.reference.speculation.expand_drafter_inputs import (
    expand_drafter_inputs as expand_drafter_inputs_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl

_TOKENS, _WARPS = 256, 2


@jit_once_for("padding_token_id", "parallel_token_id", "num_slots", "num_tokens", "num_requests")
def _expand_kernel(
    target_ptr: tl.tensor,
    target_position_ptr: tl.tensor,
    next_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    rejected_ptr: tl.tensor,
    masked_ptr: tl.tensor,
    new_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    padding_token_id: tl.tensor,
    parallel_token_id: tl.tensor,
    num_slots: tl.tensor,
    num_tokens: tl.tensor,
    num_requests: tl.tensor,
    SHIFT: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Each program writes TOKENS of the outputs of a request, one lane per output."""
    request = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(start_ptr + request).to(tl.int64)
    next_start = tl.load(start_ptr + request + 1).to(tl.int64)
    # Tokens after the last request count as its rejected tokens.
    next_start = tl.where(request + 1 < num_requests, next_start, num_tokens)
    num_valid = tl.load(end_ptr + request).to(tl.int64) + 1 - start - SHIFT
    is_place = rank < next_start - start + num_slots - SHIFT
    place = start + request * (num_slots - SHIFT) + rank

    is_valid = is_place & (rank < num_valid)
    is_rejected = rank >= num_valid + num_slots
    is_masked = (rank > num_valid) & (rank < num_valid + num_slots)
    token = tl.load(target_ptr + start + rank + SHIFT, mask=is_valid, other=0).to(tl.int64)
    token = tl.where(rank == num_valid, tl.load(next_ptr + request).to(tl.int64), token)
    token = tl.where(is_masked, parallel_token_id, tl.where(is_rejected, padding_token_id, token))
    tl.store(token_ptr + place, token, mask=is_place)
    first_position = tl.load(target_position_ptr + start).to(tl.int64)
    tl.store(position_ptr + place, tl.where(is_rejected, 0, first_position + rank), mask=is_place)
    tl.store(rejected_ptr + place, is_rejected, mask=is_place)
    tl.store(masked_ptr + place, is_masked, mask=is_place)
    is_new = is_place & (rank >= num_valid) & (rank < num_valid + num_slots)
    tl.store(new_ptr + request * num_slots + rank - num_valid, place, mask=is_new)
    if SHIFT:
        tl.store(mapping_ptr + start + rank, place, mask=rank < next_start - start)


@falls_back_to(expand_drafter_inputs_twin)
def expand_drafter_inputs(
    target_token_ids: torch.Tensor,  # [tokens] integer
    target_positions: torch.Tensor,  # [tokens] integer
    next_token_ids: torch.Tensor,  # [R] integer: the bonus token of each request
    query_start_loc: torch.Tensor,  # [R + 1] integer: index of each request's first token, then of the end
    query_end_loc: torch.Tensor,  # [R] integer: index of each request's last token that was not rejected
    *,
    padding_token_id: int,
    parallel_token_id: int,
    num_padding_slots: int,
    shift: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns (token_ids, positions, is_rejected, is_masked, new_token_indices, hidden_state_mapping).

    With P = num_padding_slots each request gets P more tokens; with shift it gets P - 1 more and loses its
    first token. The first four results are flat over all requests, new_token_indices is [R * P], and
    hidden_state_mapping is [tokens], or None without shift. The twin explains the results, shows an example
    and says what the engine does instead.

    Raises ValueError if P is below 1. Semantics as in vLLM's `copy_and_expand_eagle_inputs_kernel`.
    """
    check_padding_slots(num_padding_slots)
    check_dense(target_token_ids, target_positions, next_token_ids, query_start_loc, query_end_loc)
    num_tokens, num_requests = len(target_token_ids), len(next_token_ids)
    assert num_requests <= num_tokens, (num_requests, num_tokens)
    assert num_requests > 0 or num_tokens == 0, "tokens of no request"
    total = num_tokens + num_requests * (num_padding_slots - shift)
    token_ids, positions = target_token_ids.new_empty(total), target_positions.new_empty(total)
    is_rejected, is_masked = torch.empty(
        (2, total), dtype=torch.bool, device=target_token_ids.device
    ).unbind()
    new = query_start_loc.new_empty(num_requests * num_padding_slots)
    mapping = query_start_loc.new_empty(num_tokens) if shift else None
    if num_requests > 0:
        # The host does not know how long a request is.
        most = num_tokens + num_padding_slots - shift
        _expand_kernel[(num_requests, blocks_of(most, _TOKENS))](
            target_token_ids, target_positions, next_token_ids, query_start_loc, query_end_loc,
            token_ids, positions, is_rejected, is_masked, new, new if mapping is None else mapping,
            padding_token_id, parallel_token_id, num_padding_slots, num_tokens, num_requests,
            SHIFT=int(shift), TOKENS=_TOKENS, num_warps=_WARPS,
        )  # fmt: skip
    return token_ids, positions, is_rejected, is_masked, new, mapping
