"""One decode round as a straight line: draft, open, forward, sample, commit.

No branch on data, no allocation that depends on it: what holds here can be captured as one CUDA graph.
Speculative decoding after Leviathan et al. (arXiv 2211.17192); verification by equality of coupled samples
(Daliri, Musco, Suresh, arXiv 2408.07978), so a draft never changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import ForwardInputs, Segment
from headway.engine.models.registry import CausalLM
from headway.engine.sampler import pick_tokens
from headway.engine.slots import SlotTable
from headway.engine.speculation.draft import Drafter
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.kernels import RoundWindow, commit_round, count_tokens, open_round


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round leaves for the host."""

    emitted: (
        torch.Tensor
    )  # [rows, depth + 2] int64: how many picked tokens stay (0: padding), then all of them
    logits: torch.Tensor  # [rows, depth + 1, vocab], raw, of the picked tokens


def decode_round(
    model: CausalLM,
    pool: KVPool,
    rows: SlotTable,
    depth: int,
    drafter: Drafter,
    synthetic: SyntheticAcceptance | None = None,
) -> Outcome:
    """Runs one round over all given rows and moves their state on."""
    size = pool.block_size
    drafts = drafter(model, pool, rows, depth) if depth > 0 else rows.pending_tokens[:, :0]
    window = open_round(rows.state(), drafts, size)
    hidden = model.forward(_inputs(window, rows), pool)
    logits = model.logits(hidden).view(*window.token_ids.shape, -1)
    picked = pick_tokens(logits, rows, window.start_positions + 1, window.token_ids[:, 1:])
    if synthetic is not None and depth > 0:
        synthetic.force(picked, window.token_ids, rows, window.start_positions)
    emitted = commit_round(rows.state(), window, picked, size)
    if model.has_mtp:
        states = model.draft_hidden(hidden)
        _keep_pending_hidden(rows, states.view(*window.token_ids.shape, -1))
        if depth > 0:
            pool.keep_hidden(window.slot_mapping.flatten(), states)
    if rows.adjustments is not None:
        count_tokens(picked, emitted[:, 0], rows.adjustments)
    return Outcome(emitted, logits)


def _inputs(window: RoundWindow, rows: SlotTable) -> ForwardInputs:
    num_rows, width = window.token_ids.shape
    return ForwardInputs(
        window.token_ids.flatten(),
        window.positions.flatten(),
        window.slot_mapping.flatten(),
        (Segment(0, num_rows, width, rows.granted_block_ids, window.start_positions),),
    )


def _keep_pending_hidden(rows: SlotTable, states: torch.Tensor) -> None:
    """(h_L, s_{L+1}) .. (h_{L+a}, s_{L+a+1}) wait for the next round's first MTP pass.

    states: [rows, depth + 1, hidden].
    """
    is_live = (rows.prefill_status == 0)[:, None, None]
    hidden = rows.pending_hidden[:, : states.shape[1]]
    hidden.copy_(torch.where(is_live, states, hidden))
