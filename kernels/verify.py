"""Which drafts of a packed batch the target agrees with."""

from __future__ import annotations

import torch

from headway.kernels.reference.verify import verify_speculative_tokens as verify_speculative_tokens_twin


def verify_speculative_tokens(
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    output_tokens: torch.Tensor,  # [total] or [1, total] integer: what the target chose after each input
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(last_one_indices [rows] int64, accepted_tokens_mask [total] bool, input_tokens [total])."""
    return verify_speculative_tokens_twin(
        input_tokens,
        output_tokens,
        num_decode_requests,
        num_prefill_requests,
        num_speculative_tokens,
        out=out,
    )
