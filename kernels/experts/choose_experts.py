"""The router of a mixture of experts: the experts of each token, and the weights of their results."""

from __future__ import annotations

import torch

from headway.kernels.reference.experts.choose_experts import choose_experts as choose_experts_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl
from headway.kernels.types._experts import ExpertChoice, ExpertRule


@jit
def _choose_kernel(
    logit_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    id_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    experts: tl.tensor,
    logit_stride: tl.tensor,
    TOP_K: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program routes a token. BLOCK and SLOTS: powers of two for the experts and for a token's slots."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    used: tl.constexpr = TOP_K + HAS_SHARED
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_ptr = logit_ptr + token * logit_stride
    logits = wide(tl.load(row_ptr + expert, mask=expert < experts, other=-float("inf")))
    highest = tl.max(logits, 0)
    chances = tl.exp(logits - highest)
    # NaN is chosen last; the padding of the block is never chosen.
    ranked = tl.where(tl.abs(logits) <= float("inf"), logits, -float("inf"))
    ids = tl.zeros((SLOTS,), tl.int32)
    values = tl.zeros((SLOTS,), logits.dtype)
    is_left = expert < experts
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_left, ranked, -float("inf")), 0)
        chosen = tl.min(tl.where(is_left & (ranked == best), expert, BLOCK - 1), 0)
        is_chosen = expert == chosen
        value = tl.sum(tl.where(is_chosen, chances, 0.0), 0)
        ids = tl.where(slot == place, chosen, ids)
        values = tl.where(slot == place, value, values)
        is_left = is_left & (expert != chosen)
    total = tl.sum(values, 0) if NORMALISES else tl.sum(chances, 0)
    weights = values / total
    if HAS_SHARED:
        gate = wide(tl.load(row_ptr + experts))
        ids = tl.where(slot == TOP_K, experts, ids)
        weights = tl.where(slot == TOP_K, 1 / (1 + tl.exp(-gate)), weights)
    if HAS_SLOTS:
        ids = tl.where(tl.load(slot_ptr + token) < 0, -1, ids)
    rounded = weights.to(logit_ptr.dtype.element_ty).to(tl.float32)
    tl.store(id_ptr + token * used + slot, ids, mask=slot < used)
    tl.store(weight_ptr + token * used + slot, rounded, mask=slot < used)


def choose_experts(
    logits: torch.Tensor,  # [tokens, experts, and the gate of the shared one] float
    rule: ExpertRule,
    slot_mapping: torch.Tensor | None = None,  # [tokens] int64; -1: the token is padding
) -> ExpertChoice:
    """Returns the experts with the greatest logits; their weights are the softmax of all logits in float32,
    rounded to the logits' dtype."""
    if not takes_triton(logits):
        return choose_experts_twin(logits, rule, slot_mapping)
    assert logits.stride(1) == 1, logits.stride()
    if slot_mapping is not None:
        check_dense(slot_mapping)
    tokens, experts = len(logits), logits.shape[1] - rule.has_shared
    ids = torch.empty(tokens, rule.num_slots, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rule.num_slots, dtype=torch.float32, device=logits.device)
    if tokens > 0:
        overlaps, launch = overlap(logits.device)
        _choose_kernel[(tokens,)](
            logits, logits if slot_mapping is None else slot_mapping, ids, weights, experts, logits.stride(0),
            TOP_K=rule.top_k, NORMALISES=rule.normalises, HAS_SHARED=rule.has_shared,
            HAS_SLOTS=slot_mapping is not None, BLOCK=power_of_two(experts), SLOTS=power_of_two(rule.num_slots),
            OVERLAPS=overlaps, num_warps=1, **launch,
        )  # fmt: skip
    return ExpertChoice(ids, weights)
