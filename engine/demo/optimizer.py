"""Muon (Jordan et al., 2024): the momentum of a matrix, made nearly orthogonal by five Newton-Schulz steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay; matrices of one shape are one batch."""

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
    """Roughly the nearest (semi-)orthogonal matrices: singular values end between 0.7 and 1.2.

    matrices  [matrices, rows, columns] float32 -> the same shape, bfloat16
    """
    x: Tensor = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x
