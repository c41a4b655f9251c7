"""RMSNorm alone, after a residual addition, or of embedded tokens. The result has the input's dtype, or it is
quantised to float8_e4m3fn with a given step."""

from __future__ import annotations

import torch

from headway.kernels.elementwise._weighted_sum import weighted_sum
from headway.kernels.reference.elementwise.rms_norm import add_rms_norm as add_rms_norm_twin
from headway.kernels.reference.elementwise.rms_norm import embed_rms_norm as embed_rms_norm_twin
from headway.kernels.reference.elementwise.rms_norm import rms_norm as rms_norm_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl, warps_of


@jit
def _norm_kernel(
    x_ptr: tl.tensor,
    id_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    step_ptr: tl.tensor,
    share_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_IDS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HAS_STEP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes a token. With ids x is a table, whose rows times SCALE become the residual.
    SLOTS: the rows of x per token, whose weighted sum is added; 0: one row without a weight."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden
    # No kernel writes weights or steps.
    weight = wide(tl.load(weight_ptr + column, mask=is_inside, other=0.0))
    step = tl.load(step_ptr) if HAS_STEP else 1.0
    if OVERLAPS:
        # The next kernel may load its first weights while this one waits. It must not read anything else
        # before its own wait, because the kernel before this one may not have ended by then.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = token
    if HAS_IDS:
        source = tl.load(id_ptr + token)
    if SLOTS > 0:
        x = weighted_sum(x_ptr, share_ptr, token, column, is_inside, x_stride, SLOTS)
    else:
        x = tl.load(x_ptr + source * x_stride + column, mask=is_inside, other=0.0)
    if SCALE != 1:
        x = (wide(x) * SCALE).to(x.dtype)
    value = wide(x)
    place_ptr = residual_ptr + token * residual_stride + column
    if HAS_IDS:
        tl.store(place_ptr, x, mask=is_inside)
    if HAS_RESIDUAL:
        total = value + wide(tl.load(place_ptr, mask=is_inside, other=0.0))
        tl.store(place_ptr, total.to(x.dtype), mask=is_inside)
        value = wide(total.to(x.dtype))
    value *= tl.rsqrt(tl.sum(value * value, 0) / hidden + EPSILON)
    if UNIT_OFFSET:
        value *= 1 + weight
    else:
        value = wide(value.to(x.dtype)) * weight
    value = value.to(x.dtype)
    if HAS_STEP:
        value = (wide(value) / step).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + column, value, mask=is_inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor | None,
    step: torch.Tensor | None,
    *,
    has_residual: bool = False,
    unit_offset: bool = False,
    ids: torch.Tensor | None = None,
    scale: float = 1.0,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    (tokens, hidden), strides = residual.shape, (x.stride(1), residual.stride(1), weight.stride(0))
    dtype = residual.dtype if step is None else torch.float8_e4m3fn
    result = residual.new_empty(tokens, hidden, dtype=dtype) if out is None else out
    assert strides == (1, 1, 1), strides
    assert result.stride(1) == 1, result.stride()
    assert result.dtype == dtype, f"{result.dtype} is given for {dtype}"
    block = power_of_two(hidden)
    if tokens > 0:
        overlaps, launch = overlap(x.device)
        _norm_kernel[(tokens,)](
            x, x if ids is None else ids, residual, weight, weight if step is None else step,
            x if shares is None else shares, result, hidden,
            x.stride(0), residual.stride(0), result.stride(0),
            EPSILON=epsilon, SCALE=scale, HAS_RESIDUAL=has_residual, HAS_IDS=ids is not None, UNIT_OFFSET=unit_offset,
            HAS_STEP=step is not None, SLOTS=0 if shares is None else shares.shape[1], BLOCK=block, OVERLAPS=overlaps, num_warps=warps_of(block), **launch,
        )  # fmt: skip
    return result


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32; no result is more than 448 of it
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> torch.Tensor:
    """Returns [tokens, hidden] in x's dtype; with a step, divided by it, in float8_e4m3fn."""
    if takes_triton(x):
        return _launch(x, x, weight, epsilon, out, step, unit_offset=unit_offset)
    return rms_norm_twin(x, weight, epsilon, unit_offset=unit_offset, step=step, out=out)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float, or [tokens * slots, hidden] with shares
    residual: torch.Tensor,  # [tokens, hidden] float, in place: += x
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32, as of `rms_norm`
    shares: torch.Tensor | None = None,  # [tokens, slots] float32
) -> torch.Tensor:
    """Adds x to the residual and returns the norm of the new residual, [tokens, hidden]. With shares the
    weighted sum of a token's slots is added, as in `sum_experts`; in float32 the last product may be fused
    with the addition."""
    if not takes_triton(x):
        return add_rms_norm_twin(
            x, residual, weight, epsilon, unit_offset=unit_offset, step=step, shares=shares
        )
    if shares is not None:
        check_dense(shares)
    return _launch(
        x, residual, weight, epsilon, None, step, has_residual=True, unit_offset=unit_offset, shares=shares
    )


def embed_rms_norm(
    token_ids: torch.Tensor,  # [tokens] int64, rows of the embedding
    embedding: torch.Tensor,  # [vocab, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    scale: float = 1.0,
    unit_offset: bool = False,
    step: torch.Tensor | None = None,  # [1] float32, as of `rms_norm`
    out: torch.Tensor | None = None,  # [tokens, hidden]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the embedded tokens times the scale, their norm), [tokens, hidden] each. The scale and the
    product are rounded to the embedding's dtype. Ids are not checked."""
    if not takes_triton(embedding):
        return embed_rms_norm_twin(
            token_ids, embedding, weight, epsilon, scale=scale, unit_offset=unit_offset, step=step, out=out
        )
    check_dense(token_ids)
    embedded = embedding.new_empty(len(token_ids), embedding.shape[1])
    rounded = scale if scale == 1 else torch.tensor(scale, dtype=embedding.dtype).item()
    return embedded, _launch(
        embedding, embedded, weight, epsilon, out, step, unit_offset=unit_offset, ids=token_ids, scale=rounded
    )
