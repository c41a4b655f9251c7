"""Gathers what the next forward pass starts from: bonus tokens, their places, the accepted drafts."""

from __future__ import annotations

import torch

from headway.kernels.reference.prepare import prepare_next_forward_pass as prepare_next_forward_pass_twin


def prepare_next_forward_pass(
    num_decode_requests: int,
    output_tokens: torch.Tensor,  # [total] or [1, total] integer
    required_logit_indices: torch.Tensor,  # [total] integer: place of each packed token
    last_one_indices: torch.Tensor,  # [rows] int64
    accepted_tokens_mask: torch.Tensor,  # [total] bool
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    sampled_tokens_buf: torch.Tensor,  # [>= rows] integer, written
    last_accepted_seq_buf: torch.Tensor,  # [>= rows] integer, written
    accepted_tokens_per_request: torch.Tensor,  # [>= decode rows, S] integer, written
    accepted_token_counts: torch.Tensor,  # [>= decode rows] integer, written
    num_speculative_tokens: int,
) -> None:
    """Fills the caller's buffers; what they hold beyond the rows, and for prefill rows, stays as it is."""
    prepare_next_forward_pass_twin(
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        sampled_tokens_buf,
        last_accepted_seq_buf,
        accepted_tokens_per_request,
        accepted_token_counts,
        num_speculative_tokens,
    )
