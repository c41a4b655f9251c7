"""Masks the tokens that a grammar does not allow, at each position of a window."""

from __future__ import annotations

import torch

from headway.kernels.reference.sampling.mask_logits import mask_logits as mask_logits_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, jit_once_for, takes_triton, tl

# Tokens at a time, and the most programs per position: the programs of unmasked rows end at once.
_TOKENS, _PROGRAMS, _WARPS = 1024, 16, 4


@jit_once_for("window", "line_stride", "place_stride", "line_ptr")
def _mask_kernel(
    logits_ptr: tl.tensor,
    line_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    window: tl.tensor,
    vocab_size: tl.tensor,
    line_stride: tl.tensor,
    place_stride: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Each program masks every num_programs(1)-th run of TOKENS at one position."""
    at = tl.program_id(0).to(tl.int64)
    line = tl.load(line_ptr + at // window)
    if line >= 0:
        logits_ptr += at * vocab_size
        allowed_ptr += line * line_stride + at % window * place_stride
        for first in range(tl.program_id(1) * TOKENS, vocab_size, tl.num_programs(1) * TOKENS):
            token = first + tl.arange(0, TOKENS)
            is_there = token < vocab_size
            word = tl.load(allowed_ptr + token // 32, mask=is_there, other=0)
            is_forbidden = is_there & (((word >> (token % 32)) & 1) == 0)
            value = tl.load(logits_ptr + token, mask=is_forbidden, other=0.0)
            tl.store(
                logits_ptr + token, -float("inf"), mask=is_forbidden & (value.to(tl.float32) < float("inf"))
            )


def mask_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float; changed in place
    lines: torch.Tensor,  # [rows] int64: the row's entry of `allowed`; -1: everything is allowed
    allowed: torch.Tensor,  # [n, window or more, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i
) -> None:
    """Sets the logits of forbidden tokens to -inf. A logit that is NaN or +inf stays NaN or +inf, which
    `sample` detects. The bit order is that of llguidance and xgrammar. The twin computes float64 logits,
    which only tests of exactness use, on every device."""
    if not takes_triton(logits) or logits.dtype == torch.float64:
        mask_logits_twin(logits, lines, allowed)
        return
    check_dense(logits, lines, allowed)
    rows, window, vocab_size = logits.shape
    assert allowed.shape[1] >= window, (tuple(allowed.shape), window)
    assert allowed.shape[2] * 32 >= vocab_size, (tuple(allowed.shape), vocab_size)
    if logits.numel() == 0:
        return
    grid = rows * window, min(_PROGRAMS, blocks_of(vocab_size, _TOKENS))
    line_stride, place_stride, _ = allowed.stride()
    _mask_kernel[grid](
        logits, lines, allowed, window, vocab_size, line_stride, place_stride, TOKENS=_TOKENS, num_warps=_WARPS
    )  # fmt: skip
