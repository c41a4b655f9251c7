"""Runs a model's trunk and MTP head by hand: over a prompt, then draft by draft."""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.model_pair import ModelPair
from headway_testing.paged import PagedSequences


def prefill(models: ModelPair, tokens: torch.Tensor, widths: list[int], *, room: int = 8) -> PagedSequences:
    """Runs trunk and head over all tokens, in chunks; the head by `fill_cache`."""
    sequences = PagedSequences(models, 1, len(tokens) + room)
    head = models.draft
    previous, first = torch.zeros(1, head.hidden_size, dtype=head.dtype), 0
    for width in widths:
        span, part = [(0, first, width)], tokens[first : first + width]
        states = torch.cat([previous, head.draft_hidden(TargetStates(sequences.forward(span, part)))])
        sequences.fill(span, part, states[:-1])
        previous, first = states[-1:], first + width
    return sequences


def draft_chain(
    sequences: PagedSequences, token: torch.Tensor, state: torch.Tensor, position: int, depth: int
) -> torch.Tensor:
    """Returns logits of greedy drafts from the pair (state [1, hidden], token [1]) at `position`: [depth,
    vocab]."""
    found = []
    for step in range(depth):
        state = sequences.draft([(0, position + step, 1)], token, state)
        found.append(sequences.head.logits(state)[0])
        token = found[-1].argmax()[None]
    return torch.stack(found)
