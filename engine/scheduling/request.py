"""A request as the engine's host side sees it. Knows no tensors, no text, no HTTP."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headway.engine.grammar.guide import Guide
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.depth.acceptance import Record


class Status(enum.Enum):
    WAITING = enum.auto()
    PREFILLING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """Host truth of one request. Mutable: the scheduler is its only writer. Equal only to itself.

    num_computed: the length in the KV cache that the host knows of: tokens whose prefill was planned, then
    num_tokens - 1 after each round that was read. num_cached: how many of them the last admission found in
    the prefix cache. num_chunks_in_flight and num_rounds_in_flight count what was launched and not read yet:
    each round may have added up to depth + 1 tokens that the host does not know. group_id: the same for all
    choices of one HTTP request; None for a request that is alone. priority: lower is served first. arrival:
    how many requests the scheduler took in before this one. prompt_logprobs: of the prompt so far, chunk by
    chunk, if the request asked for them. num_prompt_cached: num_cached of the first admission.
    num_tokens_in_flight: the most tokens that rounds in flight may add. num_pending: the most tokens that
    wait for the drafter once all that was planned has run. num_draft_filled: the first tokens of which the
    drafter has kept all that it keeps. guide: the request's place in its grammar; None: any text will do.
    prediction_token_ids: what its output probably is. joins_ngrams: n-gram lookup may draft for it beside
    another drafter, which is checked alone.
    draft_record: how often its drafts are accepted; None: nobody asks. is_audit: it computes again what
    another one got (see `Auditor`), without cached prefixes and outside of the statistics. is_replay: an
    engine before this one had taken it in.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    max_draft_tokens: int | None = None
    prediction_token_ids: tuple[int, ...] = ()
    joins_ngrams: bool = True
    cache_salt: str = ""
    priority: int = 0
    group_id: int | None = None
    guide: Guide | None = None
    is_audit: bool = False
    is_replay: bool = False
    arrival: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    row: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_chunks_in_flight: int = 0
    num_rounds_in_flight: int = 0
    num_preemptions: int = 0
    num_tokens_in_flight: int = 0
    num_pending: int = 0
    num_draft_filled: int = 0
    draft_record: Record | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    arrival_seconds: float = 0.0
    queue_seconds: float = 0.0
    num_prompt_cached: int = 0
    num_long_gaps: float = 0.0
    # Tokens that may ever enter the KV cache: the last one of the output never does.
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def precedence(self) -> tuple[int, int]:
        """The order within a group, and of what is computed for those that run."""
        return self.priority, self.arrival

    @property
    def group(self) -> int:
        return self.request_id if self.group_id is None else self.group_id

    @property
    def scores_prompt(self) -> bool:
        """Returns whether log-probabilities of the prompt are wanted and were not sent yet."""
        return self.sampling.num_prompt_logprobs is not None and not self.output_token_ids

    @property
    def is_in_flight(self) -> bool:
        return self.num_chunks_in_flight + self.num_rounds_in_flight > 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        split = len(self.prompt_token_ids)
        output = self.output_token_ids[max(0, start - split) : max(0, stop - split)]
        return self.prompt_token_ids[start:stop] + output
