"""One decode round as a straight line: draft, advance, forward, sample, verify, prepare, rewind.

No branch on data, no allocation that depends on it: what holds here can be captured as one CUDA graph.
Speculative decoding after Leviathan et al. (arXiv 2211.17192); verification by equality of coupled samples
(Daliri, Musco, Suresh, arXiv 2408.07978), so a draft never changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import window_inputs
from headway.engine.models.registry import CausalLM
from headway.engine.sampler import pick_tokens, score_tokens
from headway.engine.slots import SlotTable, live_lengths
from headway.engine.speculation.draft import Drafter
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.kernels import (
    advance,
    count_tokens,
    prepare_next_forward_pass,
    rewind_kv_cache,
    verify_speculative_tokens,
)


@dataclass(frozen=True, slots=True)
class Window:
    """The target's input of a round: t_L, d_1 .. d_K by row."""

    tokens: torch.Tensor  # [rows, depth + 1] int64
    is_valid: torch.Tensor  # [rows, depth + 1] bool: within the row's limit and depth cap
    start_positions: torch.Tensor  # [rows] int64: L, 0 for padding rows


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round leaves for the host."""

    emitted: (
        torch.Tensor
    )  # [rows, depth + 2] int64: how many picked tokens stay (0: padding), then all of them
    logprobs: torch.Tensor | None  # [scored rows, depth + 1, 2 + 2 * top] float32 as score_tokens packs them


def decode_round(
    model: CausalLM,
    pool: KVPool,
    rows: SlotTable,
    depth: int,
    drafter: Drafter,
    scored_rows: torch.Tensor | None = None,  # [n] int64: rows whose picked tokens are scored, if any
    synthetic: SyntheticAcceptance | None = None,
) -> Outcome:
    """Runs one round over all given rows and moves their state on."""
    window = _open_window(model, pool, rows, depth, drafter)
    _advance(rows, depth, pool.block_size)
    inputs = window_inputs(
        window.tokens, window.start_positions, window.is_valid, rows.granted_block_ids, pool.block_size
    )
    hidden = model.forward(inputs, pool)
    logits = model.logits(hidden).view(*window.tokens.shape, -1)
    picked = pick_tokens(logits, rows, window.start_positions + 1, window.tokens[:, 1:])
    if synthetic is not None and depth > 0:
        picked = synthetic.force(picked, window.tokens, rows, window.start_positions)
    logprobs = None if scored_rows is None else _score(logits, picked, scored_rows)
    accepted_counts, bonus = _verify(window, picked, depth)
    _rewind(rows, accepted_counts, depth, pool.block_size)
    is_live = rows.prefill_status == 0
    _commit(rows, is_live, bonus)
    if depth > 0:
        states = model.draft_hidden(hidden).view(*window.tokens.shape, -1)
        _set_pending(rows, is_live, accepted_counts, picked, states)
        _keep_block_hidden(pool, rows, window, states)
    emitted_counts = (accepted_counts + 1) * is_live
    if rows.adjustments is not None:
        count_tokens(picked, emitted_counts, rows.adjustments)
    return Outcome(torch.cat([emitted_counts[:, None], picked], dim=1), logprobs)


def _open_window(model: CausalLM, pool: KVPool, rows: SlotTable, depth: int, drafter: Drafter) -> Window:
    last = rows.last_tokens[:, None]
    tokens = torch.cat([last, drafter(model, pool, rows, depth)], dim=1) if depth > 0 else last
    places = torch.arange(depth + 1, device=tokens.device)
    room = torch.minimum(rows.limits - rows.kv_lengths, rows.depth_caps + 1)
    return Window(tokens, places < room[:, None], live_lengths(rows))


def _advance(rows: SlotTable, depth: int, block_size: int) -> None:
    advance(
        rows.kv_lengths,
        rows.last_block_offsets,
        rows.block_counts,
        rows.last_block_ids,
        rows.kv_block_ids,
        rows.granted_block_ids,
        rows.limits,
        rows.prefill_status,
        depth,
        block_size,
    )


def _verify(window: Window, picked: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted drafts [rows] int64, the token after them [rows] int64)."""
    rows = len(picked)
    device = picked.device
    output_tokens = picked.flatten()
    input_tokens = torch.where(window.is_valid, window.tokens, -1).flatten()
    last, is_accepted, input_tokens = verify_speculative_tokens(input_tokens, output_tokens, rows, 0, depth)
    bonus = torch.empty(rows, dtype=torch.int64, device=device)
    last_places = torch.empty(rows, dtype=torch.int64, device=device)
    accepted_tokens = torch.empty((rows, depth), dtype=torch.int64, device=device)
    accepted_counts = torch.empty(rows, dtype=torch.int64, device=device)
    places = torch.arange(picked.numel(), device=device)
    prepare_next_forward_pass(
        rows,
        output_tokens,
        places,
        last,
        is_accepted,
        input_tokens,
        bonus,
        last_places,
        accepted_tokens,
        accepted_counts,
        depth,
    )
    return accepted_counts, bonus


def _rewind(rows: SlotTable, accepted_counts: torch.Tensor, depth: int, block_size: int) -> None:
    """Takes back the rejected tokens. Blocks stay granted, so what it reports as released is not used."""
    rewind_kv_cache(
        accepted_counts,
        rows.prefill_status,
        rows.last_block_offsets,
        rows.kv_lengths,
        rows.block_counts,
        rows.last_block_ids,
        rows.kv_block_ids,
        depth,
        block_size,
    )


def _commit(rows: SlotTable, is_live: torch.Tensor, bonus: torch.Tensor) -> None:
    rows.last_tokens.copy_(torch.where(is_live, bonus, rows.last_tokens))


def _score(logits: torch.Tensor, picked: torch.Tensor, scored_rows: torch.Tensor) -> torch.Tensor:
    scores = score_tokens(logits[scored_rows].flatten(0, 1), picked[scored_rows].flatten())
    return scores.view(len(scored_rows), picked.shape[1], -1)


def _set_pending(
    rows: SlotTable,
    is_live: torch.Tensor,
    accepted_counts: torch.Tensor,
    picked: torch.Tensor,
    states: torch.Tensor,
) -> None:
    """(h_L, s_{L+1}) .. (h_{L+a}, s_{L+a+1}) wait for the next round's first MTP pass."""
    width = picked.shape[1]
    tokens, hidden = rows.pending_tokens[:, :width], rows.pending_hidden[:, :width]
    tokens.copy_(torch.where(is_live[:, None], picked, tokens))
    hidden.copy_(torch.where(is_live[:, None, None], states, hidden))
    rows.pending_counts.copy_(torch.where(is_live, accepted_counts + 1, rows.pending_counts))


def _keep_block_hidden(pool: KVPool, rows: SlotTable, window: Window, states: torch.Tensor) -> None:
    """h of each block's last token goes beside the block, for the first pair after a prefix hit.

    A window shorter than a block ends at most one block. Rejected tokens leave a state that the true
    token overwrites; a block is published only after that.
    """
    size = pool.block_size
    start = window.start_positions
    place = (-(start + 1)) % size  # of the token at the end of the block that holds position `start`
    width = window.tokens.shape[1]
    index = place.clamp(max=width - 1)[:, None]
    ends_here = (place < width) & window.is_valid.gather(1, index)[:, 0]
    block_ids = rows.granted_block_ids.gather(1, ((start + place) // size * ends_here)[:, None])[:, 0]
    pool.keep_hidden(
        block_ids,
        states.gather(1, index[:, :, None].expand(-1, -1, states.shape[-1]))[:, 0],
        ends_here,
    )
