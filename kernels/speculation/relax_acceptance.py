"""Accepts drafts that the target finds probable enough, while a row reasons. LOSSY: the text is no longer
what the target samples."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.relax_acceptance import relax_acceptance as relax_acceptance_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, jit_once_for, tl
from headway.kernels.speculation._device_functions import accepts_draft

_ROWS, _WARPS = 32, 1
_BLOCK, _BLOCK_WARPS = 4096, 8


@jit_once_for("row_stride", "place_stride")
def _judge_kernel(
    logits_ptr: tl.tensor,
    token_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    id_ptr: tl.tensor,
    span_ptr: tl.tensor,
    probable_ptr: tl.tensor,
    row_stride: tl.tensor,
    place_stride: tl.tensor,
    vocab_size: tl.tensor,
    top_k: tl.tensor,
    max_gap: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Each program judges a draft, in one pass over the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    cell = row * (DEPTH + 1) + place + 1
    phase = tl.load(span_ptr + 3 * tl.load(id_ptr + row))
    line_ptr = logits_ptr + row * row_stride + place * place_stride
    own = tl.load(line_ptr + tl.load(token_ptr + cell)).to(WIDE)
    is_probable = (tl.load(valid_ptr + cell) != 0) & (own > -float("inf")) & (own < float("inf"))
    if is_probable & (phase != 0):
        # The greatest logit so far is finite, because it is not below the draft's own.
        best = own
        total = own * 0
        num_above = tl.full((), 0, tl.int32)
        num_broken = tl.full((), 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            value = tl.load(line_ptr + token, mask=token < vocab_size, other=-float("inf")).to(WIDE)
            is_number = value < float("inf")
            num_broken += tl.sum((is_number == 0).to(tl.int32), 0)
            value = tl.where(is_number, value, -float("inf"))
            greatest = tl.maximum(best, tl.max(value, 0))
            total = total * tl.exp(best - greatest) + tl.sum(tl.exp(value - greatest), 0)
            best = greatest
            num_above += tl.sum((value > own).to(tl.int32), 0)
        gap = (1 - tl.exp(own - best)) / total
        is_probable = (gap <= max_gap) & (num_above < top_k) & (num_broken == 0)
    tl.store(probable_ptr + row * DEPTH + place, is_probable)


@jit
def _relax_kernel(
    sampled_ptr: tl.tensor,
    token_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    id_ptr: tl.tensor,
    span_ptr: tl.tensor,
    probable_ptr: tl.tensor,
    num_rows: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    line = 3 * tl.load(id_ptr + row, mask=is_row, other=0)
    phase = tl.load(span_ptr + line, mask=is_row, other=0)
    start = tl.load(span_ptr + line + 1, mask=is_row, other=-1)
    end = tl.load(span_ptr + line + 2, mask=is_row, other=-1)
    first = row * (DEPTH + 1)
    is_accepted = is_row & (tl.load(valid_ptr + first, mask=is_row, other=0) != 0)
    for place in tl.static_range(DEPTH + 1):
        token = tl.load(token_ptr + first + place, mask=is_row, other=0)
        if place > 0:
            is_accepted = is_accepted & (tl.load(valid_ptr + first + place, mask=is_row, other=0) != 0)
            is_probable = tl.load(probable_ptr + row * DEPTH + place - 1, mask=is_row, other=0) != 0
            own = tl.load(sampled_ptr + first + place - 1, mask=is_row, other=0)
            own = tl.where(is_accepted & (phase == 1) & is_probable, token, own)
            tl.store(sampled_ptr + first + place - 1, own, mask=is_row)
            is_accepted = accepts_draft(is_accepted, token, own)
        reasons = ((phase == 1) & (token != end)) | ((phase == 2) & (token == start))
        phase = tl.where(is_accepted, reasons.to(tl.int64), phase)
    tl.store(span_ptr + line, phase, mask=is_row)


@falls_back_to(relax_acceptance_twin)
def relax_acceptance(
    sampled: torch.Tensor,  # [rows, depth + 1] int64, in place: all places but the last
    logits: torch.Tensor,  # [rows, depth + 1, vocab] float: those that were sampled from
    tokens: torch.Tensor,  # [rows, depth + 1] int64: a token, then the drafts
    is_valid: torch.Tensor,  # [rows, depth + 1] bool: of the same; a row without valid tokens is padding
    state_ids: torch.Tensor,  # [rows] int64: lines of `spans`, each once
    spans: torch.Tensor,  # [N, 3] int64, the phases in place
    top_k: int,
    max_gap: float,
) -> None:
    """Overwrites the target's sampled tokens with the drafts that are accepted.

    This is the relaxed acceptance of TensorRT-LLM's MTP decoding: in a row that reasons a draft is also
    accepted if fewer than top_k tokens are more probable and the most probable one is so by at most max_gap.
    The twin explains a line of spans and shows an example.
    """
    check_dense(sampled, tokens, is_valid, state_ids, spans)
    assert logits.stride(2) == 1, "logits of a place are adjacent"
    num_rows, width = sampled.shape
    if num_rows == 0:
        return
    is_probable = torch.empty((num_rows, width - 1), dtype=torch.bool, device=sampled.device)
    places = tokens, is_valid, state_ids, spans, is_probable
    if width > 1:
        _judge_kernel[(num_rows, width - 1)](
            logits, *places, *logits.stride()[:2], logits.shape[2], top_k, max_gap,
            DEPTH=width - 1, BLOCK=_BLOCK, WIDE=tl.float64 if logits.dtype == torch.float64 else tl.float32,
            num_warps=_BLOCK_WARPS,
        )  # fmt: skip
    _relax_kernel[(blocks_of(num_rows, _ROWS),)](
        sampled, *places, num_rows, DEPTH=width - 1, ROWS=_ROWS, num_warps=_WARPS
    )
