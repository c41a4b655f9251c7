"""The optimizers of every stage of training, AdamW and Muon, and the schedule of their learning rates.

Muon (Jordan et al., 2024) makes the momentum of a matrix nearly orthogonal by five Newton-Schulz steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOMENTUM = 0.95


@dataclass(frozen=True, slots=True)
class Schedule:
    """The number of steps and the peak learning rates, with linear warm-up and linear decay to zero."""

    steps: int
    warmup_steps: int
    muon_lr: float
    adam_lr: float

    def factor(self, step: int) -> float:
        """Returns the share of the peak learning rates at a step."""
        return min(
            (step + 1) / self.warmup_steps, (self.steps - step) / (self.steps - self.warmup_steps), 1.0
        )

    def advance(self, step: int, muon: Muon, adam: torch.optim.AdamW) -> None:
        """Runs a step of both optimizers."""
        factor = self.factor(step)
        for group in adam.param_groups:
            group["lr"] = factor * self.adam_lr
        adam.step()
        muon.step(factor * self.muon_lr)


def optimizers(module: nn.Module, weight_decay: float) -> tuple[Muon, torch.optim.AdamW]:
    """Returns Muon for the matrices of the blocks, and AdamW for embedding, lm_head, norms and biases."""
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    matrices: list[Tensor] = []
    for name, parameter in module.named_parameters():
        is_table = "embed_tokens" in name or "lm_head" in name
        kind = vectors if parameter.dim() == 1 else tables if is_table else matrices
        kind.append(parameter)
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=vectors[0].is_cuda,
    )
    return Muon(matrices, weight_decay=weight_decay), adam


class Muon:
    """Orthogonalised Nesterov momentum with decoupled weight decay. Matrices of one shape form a batch."""

    def __init__(self, matrices: Iterable[Tensor], *, weight_decay: float) -> None:
        groups: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.weight_decay = weight_decay
        self.groups = list(groups.values())
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrices, momentum in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([m.grad for m in matrices if m.grad is not None])  # [matrices, rows, columns]
            momentum.lerp_(grads, 1 - MOMENTUM)
            update = orthogonalise(grads.lerp(momentum, MOMENTUM)).float()
            rows, columns = update.shape[-2:]
            torch._foreach_mul_(matrices, 1 - lr * self.weight_decay)
            torch._foreach_add_(matrices, update.unbind(), alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Returns approximately the nearest (semi-)orthogonal matrices, with singular values between 0.7 and 1.2,
    in bfloat16. matrices: [matrices, rows, columns] float32."""
    x: Tensor = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x
