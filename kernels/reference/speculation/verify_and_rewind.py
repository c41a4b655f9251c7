"""Verifies a round's drafts and advances its rows: verify, prepare and rewind in one (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.prepare import prepare_next_forward_pass
from headway.kernels.reference.speculation.rewind import rewind_kv_cache
from headway.kernels.reference.speculation.verify import verify_speculative_tokens
from headway.kernels.types._row_state import RoundWindow, RowState


def verify_and_rewind(
    rows: RowState,  # as `prepare_verify_inputs` left it; all but limits, depth_caps, grants and prefill_status in place
    window: RoundWindow,
    sampled: torch.Tensor,  # [N, S + 1] int64: what the target chose after each token of the window
    block_size_tokens: int,
    *,
    broken: torch.Tensor | None = None,  # [N, S + 1] bool: as `sample` writes it
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [N, S + 2] int64: the number of sampled tokens that stay (0 for padding), then all of them, -1
    where they are broken.

    If a drafts are accepted, the a + 1 sampled tokens up to the bonus token stay. The row's last token
    becomes sampled[a], the S - a rejected tokens are removed from the cache, and a + 1 sampled tokens are
    pending: from the first place on or, without drafts (S = 0), after the tokens that were pending before, at
    most in the last place. A broken token is treated like any other.
    """
    num_rows, width = sampled.shape
    depth = width - 1
    bonus, accepted_counts = _accepted(window, sampled)
    rewind_kv_cache(
        accepted_counts, rows.prefill_status, rows.last_block_offsets, rows.kv_lengths, rows.block_counts,
        rows.last_block_ids, rows.kv_block_ids, depth, block_size_tokens,
    )  # fmt: skip
    is_live = rows.prefill_status == 0
    rows.last_tokens.copy_(torch.where(is_live, bonus, rows.last_tokens))
    places = torch.arange(width, device=sampled.device).expand(num_rows, width)
    if depth == 0:
        places = rows.pending_counts.clamp(0, rows.pending_tokens.shape[1] - 1)[:, None]
    pending = rows.pending_tokens.gather(1, places)
    rows.pending_tokens.scatter_(1, places, torch.where(is_live[:, None], sampled, pending))
    pending_counts = places[:, 0] + accepted_counts + 1
    rows.pending_counts.copy_(torch.where(is_live, pending_counts, rows.pending_counts))
    told = sampled if broken is None else sampled.masked_fill(broken, -1)
    emitted = torch.cat([((accepted_counts + 1) * is_live)[:, None], told], dim=1)
    return emitted if out is None else out.copy_(emitted)


def _accepted(
    window: RoundWindow,
    sampled: torch.Tensor,  # [N, S + 1] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the bonus token, the number of accepted drafts) of each row, [N] int64 each."""
    num_rows, width = sampled.shape
    depth = width - 1
    input_tokens = torch.where(window.is_valid, window.token_ids, -1).flatten()
    output_tokens = sampled.flatten()
    last, is_accepted, _ = verify_speculative_tokens(input_tokens, output_tokens, num_rows, 0, depth)
    bonus, last_places, accepted_counts = torch.empty(
        (3, num_rows), dtype=torch.int64, device=sampled.device
    ).unbind()
    indices = torch.arange(sampled.numel(), device=sampled.device)
    accepted_tokens = torch.empty((num_rows, depth), dtype=torch.int64, device=sampled.device)
    prepare_next_forward_pass(
        num_rows, output_tokens, indices, last, is_accepted, input_tokens, bonus, last_places,
        accepted_tokens, accepted_counts, depth,
    )  # fmt: skip
    return bonus, accepted_counts
