"""Selects each request's next input token from a padded batch of sampled tokens (PyTorch twin)."""

from __future__ import annotations

import torch


def prepare_next_tokens_padded(
    sampled_token_ids: torch.Tensor,  # [R, K + 1] integer, -1 where rejected
    discard_mask: torch.Tensor,  # [R] bool: requests whose tokens do not count
    backup_token_ids: torch.Tensor,  # [R] integer
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (next_token_ids, valid_counts), [R] each, both of the sampled tokens' dtype.

    Tokens other than -1 and below vocab_size are valid. The next token is the last valid one, or the backup
    token if there is none. A discarded request has no valid tokens. With a vocabulary of 10 and the second
    request discarded:

        sampled   7 3 -1     backup  1     next  3     count  2
                  7 3  5             2           2            0
                 -1 12 -1            4           4            0

    Semantics as in vLLM's `eagle_prepare_next_token_padded_kernel`. In the engine `verify_and_rewind` writes
    the next token of each row to `RowState.last_tokens` and does not change rows whose tokens do not count.
    """
    is_valid = (sampled_token_ids != -1) & (sampled_token_ids < vocab_size) & ~discard_mask[:, None]
    places = torch.arange(sampled_token_ids.shape[1], device=sampled_token_ids.device)
    last = torch.where(is_valid, places, -1).amax(1)
    chosen = sampled_token_ids.gather(1, last.clamp(min=0)[:, None])[:, 0]
    tokens = torch.where(last < 0, backup_token_ids, chosen)
    return tokens.to(sampled_token_ids.dtype), is_valid.sum(1).to(sampled_token_ids.dtype)
