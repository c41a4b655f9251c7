"""Expands the target's inputs to those of a drafter that drafts several tokens in one pass (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_padding_slots


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
    first token. Its tokens are then its valid tokens, its bonus token, P - 1 tokens parallel_token_id, and
    padding_token_id for each rejected token. Positions count from the position of the request's first token,
    and are 0 for rejected tokens. A request of the tokens a b c at positions 5 6 7, of which c was rejected,
    with bonus token s and P = 3:

        without shift   a b s m m p   positions 5 6 7 8 9 0   is_masked 0 0 0 1 1 0   new  2 3 4
        with shift      b s m m p     positions 5 6 7 8 0     is_masked 0 0 1 1 0     new  1 2 3

    token_ids, positions, is_rejected (bool) and is_masked (bool) are flat over all requests, and
    new_token_indices [R * P] are the indices of bonus and parallel tokens in them. hidden_state_mapping
    [tokens] is the index of equal rank in its request for each input token, also for rejected ones (0 1 2
    above); it is None without shift. Each request must have a token that was not rejected. Tokens after the
    last request, the padding of a graph, count as its rejected tokens. The first two results have the dtypes
    of their sources, the indices that of query_start_loc.

    Raises ValueError if num_padding_slots is below 1.

    Semantics as in vLLM's `copy_and_expand_eagle_inputs_kernel`, which P-EAGLE and PARD need. No drafter of
    the engine drafts several tokens in one pass: `verify_and_rewind` stores the pairs of the MTP head, whose
    tokens are shifted by one, as pending, and `open_drafts` makes a window of them.
    """
    check_padding_slots(num_padding_slots)
    num_tokens, num_requests, device = len(target_token_ids), len(next_token_ids), target_token_ids.device
    starts, more = query_start_loc[:-1], num_padding_slots - shift
    firsts = starts + more * torch.arange(num_requests, device=device)
    num_valid = query_end_loc - starts + 1 - int(shift)

    place = torch.arange(num_tokens + more * num_requests, device=device)
    request = torch.searchsorted(firsts, place, right=True) - 1
    rank = place - firsts[request]
    valid = num_valid[request]
    is_valid, is_rejected = rank < valid, rank >= valid + num_padding_slots
    is_masked = (rank > valid) & ~is_rejected
    sources = (starts[request] + rank + int(shift)).clamp(max=num_tokens - 1)
    token_ids = torch.where(is_valid, target_token_ids[sources], next_token_ids[request])
    token_ids = token_ids.masked_fill(is_masked, parallel_token_id).masked_fill(is_rejected, padding_token_id)
    positions = target_positions[starts[request]] + rank
    new = (firsts + num_valid)[:, None] + torch.arange(num_padding_slots, device=device)
    mapping = None
    if shift:
        token = torch.arange(num_tokens, device=device)
        mapping = token + more * (torch.searchsorted(starts.long(), token, right=True) - 1)
        mapping = mapping.to(query_start_loc.dtype)
    return (
        token_ids.to(target_token_ids.dtype),
        positions.masked_fill(is_rejected, 0).to(target_positions.dtype),
        is_rejected,
        is_masked,
        new.flatten().to(query_start_loc.dtype),
        mapping,
    )
