"""The router of a mixture of experts: the experts of each token, and the weights of their results (PyTorch
twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import sigmoid, wide
from headway.kernels.types._experts import ExpertChoice, ExpertRule


def choose_experts(
    logits: torch.Tensor,  # [tokens, experts, and the gate of the shared one] float
    rule: ExpertRule,
    slot_mapping: torch.Tensor | None = None,  # [tokens] int64; -1: the token is padding
) -> ExpertChoice:
    """Returns the experts with the greatest logits; their weights are the softmax of all logits in float32,
    rounded to the logits' dtype."""
    values = wide(logits)
    routed = values[:, :-1] if rule.has_shared else values
    ranked = routed.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    # A stable sort leaves equal logits in the order of the experts.
    ids = ranked.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
    # With torch's softmax the bits of a row could depend on the number of rows.
    chances = torch.exp(routed - routed.amax(1, keepdim=True))
    weights = chances.gather(1, ids)
    total = weights if rule.normalises else chances
    weights = weights / total.double().sum(1, keepdim=True).to(weights.dtype)
    if rule.has_shared:
        shared = torch.full_like(ids[:, :1], logits.shape[1] - 1)
        ids, weights = torch.cat([ids, shared], 1), torch.cat([weights, sigmoid(values[:, -1:])], 1)
    if slot_mapping is not None:
        ids = torch.where(slot_mapping[:, None] < 0, -1, ids)
    return ExpertChoice(ids.int(), weights.to(logits.dtype).float())
