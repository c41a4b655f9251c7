"""One decode round as a straight line: draft, open, forward, sample, commit.

No branch on data, no allocation that depends on it: what holds here can be captured as one CUDA graph.
Speculative decoding after Leviathan et al. (arXiv 2211.17192); verification by equality of coupled samples
(Daliri, Musco, Suresh, arXiv 2408.07978), so a draft never changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ForwardInputs, beside, inputs_of
from headway.engine.sampling.sampler import NO_TOKEN, are_broken, pick_tokens
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import (
    count_tokens,
    prepare_verify_inputs,
    stamp,
    verify_and_rewind,
)

NUM_STAMPS, END_STAMP = 4, 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round leaves, for the host all of it in one piece.

    packed: times in nanoseconds (begin, drafts done, target done, end), then row by row how many picked
    tokens stay (0: padding) and all depth + 1 of them, NO_TOKEN where logits were no numbers. The first one of a row with a prompt follows the prompt.
    The end is written by what delivers the rest.
    """

    packed: torch.Tensor  # [NUM_STAMPS + rows * (depth + 2)] int64
    depth: int
    logits: torch.Tensor | None  # [rows, depth + 1, vocab], raw, of the picked tokens
    prompt_hidden: torch.Tensor | None  # [prompt tokens, hidden]: of those that shared the forward pass

    @property
    def emitted(self) -> torch.Tensor:  # [rows, depth + 2] int64
        return emitted_of(self.packed, self.depth)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Further tokens for the target's forward pass, of rows that are padding."""

    inputs: ForwardInputs
    last_places: torch.Tensor  # [rows] int64: of each row's last token among them; -1: it has none

    def lend_windows(
        self,
        states: torch.Tensor,  # [tokens, hidden], of these tokens
        hidden: torch.Tensor,  # [rows * (depth + 1), hidden], of the round's, in place
        next_positions: torch.Tensor,  # [rows] int64
    ) -> torch.Tensor:
        """[rows] int64: next_positions, of the rows with prompts what follows these.

        Their windows' first places get the states of their last tokens: what the round picks there is what comes next,
        and no lm_head is read for them alone.
        """
        has_prompt, places = self.last_places >= 0, self.last_places.clamp(min=0)
        first = hidden.view(len(places), -1, hidden.shape[1])[:, 0]
        first.copy_(torch.where(has_prompt[:, None], states[places], first))
        return torch.where(has_prompt, self.inputs.positions[places] + 1, next_positions)


def emitted_of(packed: torch.Tensor, depth: int) -> torch.Tensor:
    """[rows, depth + 2] int64: what stands behind the times, by row."""
    return packed[NUM_STAMPS:].view(-1, depth + 2)


def lines_of(packed: list[int], depth: int) -> list[list[int]]:
    """The same of a list."""
    return [packed[at : at + depth + 2] for at in range(NUM_STAMPS, len(packed), depth + 2)]


def decode_round(
    model: CausalLM,
    pool: StatePool,
    rows: RowTensors,
    depth: int,
    drafter: Drafter,
    synthetic: SyntheticAcceptance | None = None,
    *,
    keeps_logits: bool = False,
    prompts: Prompts | None = None,
) -> Outcome:
    """Runs one round over all given rows and moves their state on."""
    size = pool.block_size
    packed = rows.last_tokens.new_empty(NUM_STAMPS + len(rows.last_tokens) * (depth + 2))
    # Where nothing drafts, both times are one.
    stamp(packed[0 : 1 if depth > 0 else 2])
    drafts = rows.pending_tokens[:, :0]
    if depth > 0:
        drafts = drafter.propose(rows, depth)
        stamp(packed[1:2])
    window = prepare_verify_inputs(rows.state(), drafts, size)
    inputs = inputs_of(window, rows.granted_block_ids)
    num_tokens = len(inputs.token_ids)
    next_positions = window.next_positions
    if prompts is None:
        hidden, prompt_hidden = model.forward(inputs, pool), None
    else:
        states = model.forward(beside(inputs, prompts.inputs), pool)
        # A copy: a graph keeps the memory of what it gives, and the round's part is of no use to anyone.
        hidden, prompt_hidden = states[:num_tokens], states[num_tokens:].clone()
        next_positions = prompts.lend_windows(prompt_hidden, hidden, next_positions)
    logits = model.logits(hidden).view(*window.token_ids.shape, -1)
    stamp(packed[2:3])
    picked = pick_tokens(logits, rows, next_positions, window.token_ids[:, 1:])
    if synthetic is not None and depth > 0:
        synthetic.force(picked, window, rows)
    emitted = verify_and_rewind(rows.state(), window, picked, size, out=emitted_of(packed, depth))
    drafter.observe_round(rows, window, hidden)
    # The device goes on with a token that exists; the host ends the row's request.
    emitted[:, 1:].masked_fill_(are_broken(logits), NO_TOKEN)
    if rows.adjustments is not None:
        count_tokens(picked, emitted[:, 0], rows.adjustments)
    return Outcome(packed, depth, logits if keeps_logits else None, prompt_hidden)
