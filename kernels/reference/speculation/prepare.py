"""Gathers the inputs of the next forward pass: bonus tokens, their indices, and the accepted drafts (PyTorch
twin)."""

from __future__ import annotations

import torch


def prepare_next_forward_pass(
    num_decode_requests: int,
    output_tokens: torch.Tensor,  # [total] or [1, total] integer
    required_logit_indices: torch.Tensor,  # [total] integer: index of each packed token
    last_one_indices: torch.Tensor,  # [rows] int64
    accepted_tokens_mask: torch.Tensor,  # [total] bool
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    sampled_tokens_buf: torch.Tensor,  # [>= rows] integer, written
    last_accepted_seq_buf: torch.Tensor,  # [>= rows] integer, written
    accepted_tokens_per_request: torch.Tensor,  # [>= decode rows, S] integer, written
    accepted_token_counts: torch.Tensor,  # [>= decode rows] integer, written
    num_speculative_tokens: int,
) -> None:
    """Fills the caller's buffers. Their entries beyond the rows, and the accepted tokens of prefill rows, are
    not changed.

    Each row's sampled token is the one that the target chose after its last accepted input token. For a
    decode row with window [t, d1, d2, d3] and mask [1, 1, 0, 0] the accepted tokens are [d1, -1, -1], the
    count is 1.
    """
    last = last_one_indices.view(-1)
    rows, window = last.numel(), num_speculative_tokens + 1
    sampled_tokens_buf.view(-1)[:rows] = output_tokens.view(-1)[last]
    last_accepted_seq_buf.view(-1)[:rows] = required_logit_indices.view(-1)[last]
    packed = num_decode_requests, window
    drafts = input_tokens.view(-1)[: num_decode_requests * window].view(packed)[:, 1:]
    is_accepted = accepted_tokens_mask.view(-1)[: num_decode_requests * window].view(packed)[:, 1:]
    accepted_tokens_per_request[:num_decode_requests, :num_speculative_tokens] = drafts.where(is_accepted, -1)
    accepted_token_counts.view(-1)[:num_decode_requests] = is_accepted.sum(1)
