"""Estimates the memory of all graphs from that of some captured ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headway.engine.execution.step_key import StepKey

# The first step of each kind, which is the largest, is captured, and one of this many of all steps.
_SAMPLED_EVERY = 16


class TakenMemory(NamedTuple):
    """The used bytes of a GPU, and the part of them that PyTorch holds."""

    total: int
    by_torch: int

    @classmethod
    def now(cls, device: torch.device) -> TakenMemory:
        free, total = torch.cuda.mem_get_info(device)
        return cls(total - free, torch.cuda.memory_reserved(device))

    def since(self, earlier: TakenMemory) -> tuple[int, int]:
        """Returns the bytes that PyTorch has allocated since then, and those that CUDA has taken for
        itself."""
        by_torch = self.by_torch - earlier.by_torch
        return by_torch, max(0, self.total - earlier.total - by_torch)


def sampled_keys(keys: Sequence[StepKey]) -> list[StepKey]:
    """Returns some of the keys in their order, with the first of each kind. keys: ordered with the largest of
    each kind first."""
    kinds: dict[tuple[bool, ...], StepKey] = {}
    for key in keys:
        kinds.setdefault((key.num_rows > 0, key.num_prompt_tokens > 0, key.catches_up), key)
    some = {*kinds.values(), *keys[::_SAMPLED_EVERY]}
    return [key for key in keys if key in some]


def extrapolated_bytes(
    keys: Sequence[StepKey], some: Sequence[StepKey], by_torch: int, by_cuda: int, *, prompt_token_bytes: int
) -> int:
    """Returns the bytes of all graphs. by_torch, by_cuda: those of some of them, as `TakenMemory.since`
    returns them.

    All graphs share PyTorch's pool, whose size is that of the largest step and of the hidden states that each
    graph keeps of its prompts, prompt_token_bytes a token. CUDA takes the same for each graph.
    """
    num_kept = sum(key.num_prompt_tokens for key in keys) - sum(key.num_prompt_tokens for key in some)
    return by_torch + num_kept * prompt_token_bytes + by_cuda * len(keys) // len(some)
