"""Verifies the drafts of a packed batch against the target's tokens (PyTorch twin). Knows ids, not
probabilities."""

from __future__ import annotations

import torch


def verify_speculative_tokens(
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    output_tokens: torch.Tensor,  # [total] or [1, total] integer: what the target chose after each input
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (last_one_indices [rows] int64, accepted_tokens_mask [total] bool, input_tokens [total]).

    A batch has decode rows of S + 1 tokens, then one token per prefill row. A row's first token is accepted.
    Each further token is accepted if the one before is and the target chose it after that one.
    last_one_indices has the index of each row's last accepted token. With S = 2 and two decode rows:

        input    5 6 7 | 5 6 7 | 9          mask      1 1 0 | 1 0 0 | 1
        output   6 8 1 | 8 7 2 | 4          last one  1, 3, 6
    """
    tokens, chosen = input_tokens.view(-1), output_tokens.view(-1)
    window = num_speculative_tokens + 1
    decode_tokens = num_decode_requests * window
    total = decode_tokens + num_prefill_requests
    drafts = tokens[:decode_tokens].view(num_decode_requests, window)[:, 1:]
    targets = chosen[:decode_tokens].view(num_decode_requests, window)[:, :-1]
    is_accepted = (drafts == targets).cumprod(1)

    if out is None:
        rows = num_decode_requests + num_prefill_requests
        last = torch.zeros(rows, dtype=torch.int64, device=tokens.device)
        out = last, torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    last, mask = out
    mask.fill_(False)
    mask[:total].fill_(True)
    mask[:decode_tokens].view(num_decode_requests, window)[:, 1:] = is_accepted
    first = torch.arange(0, decode_tokens, window, device=tokens.device)
    last[:num_decode_requests] = first + is_accepted.sum(1)
    last[num_decode_requests:] = torch.arange(decode_tokens, total, device=tokens.device)
    return last, mask, tokens
