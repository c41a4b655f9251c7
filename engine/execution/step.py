"""One step of the engine: a decode round, chunks of prompts, or both in one forward pass, as two sequences of
launches.

`forward_half` ends with the logits, `sample_half` begins with sampling. Neither has branches or allocations
that depend on data, so that each, or both together, can be captured as a CUDA graph. Speculative decoding
after Leviathan et al. (arXiv 2211.17192); verification by equality of coupled samples (Daliri, Musco, Suresh,
arXiv 2408.07978), so that a draft never changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.engine.execution.host_ring import HostRing
from headway.engine.layers.causal_lm import CausalLM, TargetStates
from headway.engine.layers.inputs import ForwardInputs, RowTokens, concatenate, inputs_of
from headway.engine.sampling.sampler import pick_tokens, score_tokens
from headway.engine.speculation.drafter import Drafter, PromptTokens
from headway.engine.speculation.relaxed import RelaxedAcceptance
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.masks import Masks
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import RoundWindow, count_tokens, prepare_verify_inputs, stamp, verify_and_rewind

NUM_STAMPS, SAMPLING_STAMP, END_STAMP = 5, 3, 4


@dataclass(frozen=True, slots=True)
class StepContext:
    """Objects that all steps share.

    ring: gets the results of rounds for the host; None: the host does not read them. draft_ring: gets a time
    stamp and the drafts of rounds in two halves. kept_logits: gets the logits of rounds in two halves, and of
    rounds that return log-probabilities, so that no graph holds its own; None: each round has a tensor of its
    own.
    """

    model: CausalLM
    pool: StatePool
    drafter: Drafter
    synthetic: SyntheticAcceptance | None = None
    relaxed: RelaxedAcceptance | None = None
    ring: HostRing | None = None
    draft_ring: HostRing | None = None
    kept_logits: torch.Tensor | None = None  # [rows * (depth + 1) of the largest round, vocab]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The results of the first half of a round, for the second half. R: rows, W: depth + 1."""

    rows: RowTensors
    packed: (
        torch.Tensor
    )  # [NUM_STAMPS + R * (W + 1)] int64: see RoundOutcome; all times but the last are written
    window: RoundWindow  # the tokens to be verified
    inputs: ForwardInputs  # of these tokens alone
    next_positions: torch.Tensor  # [R] int64: of the first token that is sampled in each row
    states: TargetStates  # of R * W tokens
    logits: torch.Tensor  # [R, W, vocab]


@dataclass(frozen=True, slots=True)
class ForwardedPrompts:
    """The prompt tokens of a step, and the hidden states of the target for them."""

    tokens: PromptTokens
    states: TargetStates


@dataclass(frozen=True, slots=True)
class HalfStep:
    """The results of `forward_half`."""

    round: Forwarded | None
    prompts: ForwardedPrompts | None


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The results of a round; those for the host are one tensor.

    packed: times in nanoseconds (begin, drafts done, target done, sampling begins, end), then for each row
    the number of emitted tokens (0: padding) and all depth + 1 sampled tokens, -1 (NO_TOKEN) where the logits
    were broken. In a row whose prompt shared the pass the first token follows the prompt. The end time is
    written by the kernel that copies the rest to the host.
    """

    packed: torch.Tensor  # [NUM_STAMPS + rows * (depth + 2)] int64
    depth: int
    logits: torch.Tensor | None  # [rows, depth + 1, vocab], raw, if they are kept

    @property
    def emitted(self) -> torch.Tensor:
        """Returns [rows, depth + 2] int64: the counts, then the tokens."""
        return emitted_of(self.packed, self.depth)

    def score(
        self,
        rows: torch.Tensor,  # [n] int64
    ) -> torch.Tensor:
        """Returns [n, depth + 1, score]: the scores of the tokens that were sampled in these rows, see
        `score_tokens`."""
        assert self.logits is not None, "the logits were kept"
        sampled = self.emitted[rows, 1:].clamp(min=0)
        return score_tokens(self.logits[rows].flatten(0, 1), sampled.flatten()).view(*sampled.shape, -1)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The results of a step. prompt_hidden: [prompt tokens, hidden], the hidden states of its prompt
    tokens."""

    round: RoundOutcome | None
    prompt_hidden: torch.Tensor | None


def emitted_of(packed: torch.Tensor, depth: int) -> torch.Tensor:
    """Returns [rows, depth + 2] int64: the part after the times, by row."""
    return packed[NUM_STAMPS:].view(-1, depth + 2)


def lines_of(packed: list[int], depth: int) -> list[list[int]]:
    """Returns the same part of a list."""
    return [packed[at : at + depth + 2] for at in range(NUM_STAMPS, len(packed), depth + 2)]


def run_step(
    context: StepContext,
    rows: RowTensors | None,
    depth: int,
    prompts: PromptTokens | None = None,
    *,
    keeps_logits: bool = False,
) -> StepOutcome:
    """Runs both halves. rows: those of the decode round; None: there are only prompts."""
    half = forward_half(context, rows, depth, prompts, keeps_logits=keeps_logits)
    return sample_half(context, half, keeps_logits=keeps_logits)


def forward_half(
    context: StepContext,
    rows: RowTensors | None,
    depth: int,
    prompts: PromptTokens | None,
    *,
    tells_drafts: bool = False,
    keeps_logits: bool = False,
) -> HalfStep:
    """Drafts, then runs the target model over the windows of the rows and the tokens of the prompts.
    tells_drafts: the drafts are copied to the host, by the draft ring, before the target model runs.
    keeps_logits: the logits are read later, by another launch."""
    if rows is None:
        assert prompts is not None, "a step has rows or prompts"
        states = context.model.forward(prompts.inputs, context.pool, context.drafter.taps)
        return HalfStep(None, ForwardedPrompts(prompts, states))
    packed = rows.last_tokens.new_empty(NUM_STAMPS + len(rows.last_tokens) * (depth + 2))
    window = _open_window(context, rows, depth, packed)
    if tells_drafts and depth > 0:
        _tell_drafts(context, window)
    by_row = RowTokens(rows.state_ids, *window.token_ids.shape)
    inputs = inputs_of(window, rows.granted_block_ids, by_row)
    states, forwarded_prompts = _forward(context, inputs, prompts)
    next_positions = window.next_positions
    if forwarded_prompts is not None:
        next_positions = _place_prompt_ends(forwarded_prompts, states.last, next_positions)
    logits = context.model.logits(states.last)
    if keeps_logits and context.kept_logits is not None:
        logits = context.kept_logits[: len(logits)].copy_(logits)
    logits = logits.view(*window.token_ids.shape, -1)
    stamp(packed[2:4])
    forwarded = Forwarded(rows, packed, window, inputs, next_positions, states, logits)
    return HalfStep(forwarded, forwarded_prompts)


def sample_half(
    context: StepContext, half: HalfStep, *, keeps_logits: bool = False, masks: Masks | None = None
) -> StepOutcome:
    """Samples, verifies the drafts, advances the state of the rows and copies the results to the host. At
    last it shows the prompts to the drafter.

    masks: those of the rows of the round; None: no row has any."""
    outcome = prompt_hidden = None
    if half.round is not None:
        if masks is not None:
            stamp(half.round.packed[SAMPLING_STAMP : SAMPLING_STAMP + 1])
        outcome = _finish_round(context, half.round, masks, keeps_logits=keeps_logits)
        if context.ring is not None:
            context.ring.deliver(outcome.packed, time_index=END_STAMP)
    if half.prompts is not None:
        prompt_hidden = half.prompts.states.last
        context.drafter.observe_prompts(half.prompts.tokens, half.prompts.states)
    return StepOutcome(outcome, prompt_hidden)


def _open_window(context: StepContext, rows: RowTensors, depth: int, packed: torch.Tensor) -> RoundWindow:
    """Proposes drafts and returns the window that verifies them; writes the first two times."""
    # A round without drafts begins with the target model, so that both times are equal.
    stamp(packed[0 : 1 if depth > 0 else 2])
    drafts = rows.pending_tokens[:, :0]
    if depth > 0:
        drafts = context.drafter.propose(rows, depth)
        stamp(packed[1:2])
    return prepare_verify_inputs(rows.state(), drafts, context.pool.block_size)


def _tell_drafts(context: StepContext, window: RoundWindow) -> None:
    assert context.draft_ring is not None, "a ring takes the drafts"
    drafts = window.token_ids[:, 1:]
    told = drafts.new_empty(1 + drafts.numel())
    told[1:].view(drafts.shape).copy_(drafts)
    context.draft_ring.deliver(told, time_index=0)


def _forward(
    context: StepContext, inputs: ForwardInputs, prompts: PromptTokens | None
) -> tuple[TargetStates, ForwardedPrompts | None]:
    """Runs one forward pass over the round's tokens and the prompts. Returns the hidden states of both."""
    taps = context.drafter.taps
    if prompts is None:
        return context.model.forward(inputs, context.pool, taps), None
    both = context.model.forward(concatenate(inputs, prompts.inputs), context.pool, taps)
    of_round, of_prompts = both.split(len(inputs.token_ids))
    # The prompts' part is copied, because a graph keeps the memory of what it returns, and nothing needs the
    # round's part later.
    return of_round, ForwardedPrompts(prompts, replace(of_prompts, last=of_prompts.last.clone()))


def _place_prompt_ends(
    prompts: ForwardedPrompts,
    hidden: torch.Tensor,  # [rows * (depth + 1), hidden], of the round's tokens; changed in place
    next_positions: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Copies the hidden states of the prompts' last tokens to the first window position of their rows, which
    are padding in the round. So the round also samples the tokens after the prompts, and lm_head is not read
    once more for them.

    Returns [rows] int64: next_positions; in rows with prompts, the position after the prompt.
    """
    last_places = prompts.tokens.last_places_by_row(len(next_positions))
    has_prompt, places = last_places >= 0, last_places.clamp(min=0)
    first = hidden.view(len(places), -1, hidden.shape[1])[:, 0]
    first.copy_(torch.where(has_prompt[:, None], prompts.states.last[places], first))
    return torch.where(has_prompt, prompts.tokens.inputs.positions[places] + 1, next_positions)


def _finish_round(
    context: StepContext, forwarded: Forwarded, masks: Masks | None, *, keeps_logits: bool
) -> RoundOutcome:
    rows, window = forwarded.rows, forwarded.window
    logits, packed = forwarded.logits, forwarded.packed
    depth = window.token_ids.shape[1] - 1
    broken = torch.empty_like(window.token_ids, dtype=torch.bool)
    sampled = pick_tokens(
        logits,
        rows,
        forwarded.next_positions,
        window.token_ids[:, 1:],
        masks=masks,
        keeps_logits=keeps_logits,
        broken=broken,
    )
    if context.synthetic is not None and depth > 0:
        context.synthetic.force(sampled, window, rows)
    if context.relaxed is not None:
        context.relaxed.relax(sampled, logits, window, rows)
    size = context.pool.block_size
    # The device continues with a valid token. The host learns of broken logits and ends the row's request.
    emitted = verify_and_rewind(
        rows.state(), window, sampled, size, broken=broken, out=emitted_of(packed, depth)
    )
    context.model.commit(forwarded.inputs, emitted[:, 0], context.pool)
    context.drafter.observe_round(rows, window, forwarded.states)
    if rows.processors is not None:
        count_tokens(sampled, emitted[:, 0], rows.processors)
    return RoundOutcome(packed, depth, logits if keeps_logits else None)
