"""A request on the engine's host side. Knows no tensors, no text, no HTTP."""

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
    """The state of one request on the host. Mutable: the scheduler is its only writer. Equal only to itself.

    num_computed: the length in the KV cache as far as the host knows: the tokens whose prefill was planned,
    then num_tokens - 1 after each round whose result was read. num_cached: the number of them that the last
    admission found in the prefix cache. num_chunks_in_flight, num_rounds_in_flight: the number of those that
    were launched and not read yet; each round may have added up to depth + 1 tokens that the host does not
    know. group_id: the same for all choices of one HTTP request; None for a request that is alone. priority:
    lower is served first. arrival: the number of requests that the scheduler got before this one.
    prompt_logprobs: those of the prompt so far, chunk by chunk, if the request asked for them.
    num_prompt_cached: num_cached of the first admission. num_tokens_in_flight: the most tokens that rounds in
    flight may add. num_pending: the most tokens that wait for the drafter once all planned steps have run.
    num_draft_filled: the number of first tokens whose drafter state is final. guide: the request's state in
    its grammar; None: it has none. prediction_token_ids: the predicted output. joins_ngrams: n-gram lookup
    may draft for it together with another drafter; False while the other one is checked. draft_record: the
    acceptance of its drafts; None without a depth policy. is_audit: it recomputes another request (see
    `Auditor`), without cached prefixes and outside of the statistics. is_replay: an earlier engine process
    had accepted it.
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
    # The most tokens that may enter the KV cache: the last one of the output never does.
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def precedence(self) -> tuple[int, int]:
        """Returns the key of the order within a group, in which running requests are also computed."""
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
        """Returns tokens [start, stop) of prompt and output together."""
        split = len(self.prompt_token_ids)
        output = self.output_token_ids[max(0, start - split) : max(0, stop - split)]
        return self.prompt_token_ids[start:stop] + output
