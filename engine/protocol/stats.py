"""Counters of the engine, sent as snapshots by the loop; the API process turns them into metrics.

All counters only rise while the engine process lives; gauges say what holds now.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The time that the device worked on the parts of a step, by its own clock.

    mask: the wait for masks of grammars that were not filled in time. bookkeeping: sampling, verification,
    rewind and what follows. prefill: includes the sampling of first tokens. Prompts of a mixed step count
    under target; the start of their rows is not counted.
    """

    draft: float = 0.0
    target: float = 0.0
    mask: float = 0.0
    bookkeeping: float = 0.0
    prefill: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.target + self.mask + self.bookkeeping + self.prefill

    @property
    def round(self) -> float:
        """Returns the time of the work on the round."""
        return self.draft + self.target + self.bookkeeping


STAGES = tuple(field.name for field in fields(StageSeconds))
# Upper bounds of the counts of steps by their tokens.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


AuditOutcome = Literal["same", "different", "dropped"]


class EngineStats(msgspec.Struct, kw_only=True):
    """One snapshot. Mutable: the scheduler is its only writer, the loop sends it.

    A row-round counts once its tokens are read, with the tokens that stay in the output: tokens after a stop
    token, or of a request that has ended, count neither as drafted nor as accepted nor as emitted. So
    num_generation_tokens = first tokens of prefills + sum of emitted * row_rounds_by_emitted_tokens[emitted].
    num_drafts: row-rounds with at least one valid draft. num_kv_blocks_cached: unused blocks that still hold
    a prefix. Per-position lists are indexed by draft position - 1 and have max depth entries. A draft counts
    for position i only if it was valid there (within the row's limit and depth cap). num_masked_rows: rows of
    steps whose next tokens a grammar restricted. num_lossy_requests: requests whose drafts were to be
    accepted by the relaxed rule of the configuration while they reason. num_nan_logits: requests that ended
    because their logits were NaN or infinite. stage_seconds: the device time by stage; keys are STAGES.
    round_seconds: the device time of rounds whose time without drafts is known, including the drafter's
    catching up, as in TokenEvent; undrafted_seconds: the estimated time of rounds without drafts for the same
    tokens. kv_block_size: tokens. num_prefix_query_tokens: tokens of prompts that were looked up in the
    prefix cache. num_step_tokens: prompt tokens that steps computed and tokens that they generated.
    num_steps_by_tokens: the number of steps with at most STEP_TOKEN_BOUNDS[i] of them and more than the bound
    before; the last entry counts those above. audits_by_outcome: requests that were recomputed (see
    `Auditor`), and those that were dropped before.
    """

    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_cached: int = 0
    kv_block_size: int = 0
    # counters
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_steps_by_tokens: list[int] = []
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_tokens_per_position: list[int] = []
    accepted_tokens_per_position: list[int] = []
    rounds_by_depth: dict[int, int] = {}
    row_rounds_by_emitted_tokens: dict[int, int] = {}
    stage_seconds: dict[str, float] = {}
    round_seconds: float = 0.0
    undrafted_seconds: float = 0.0
    num_graph_replays: int = 0
    num_preemptions: int = 0
    num_nan_logits: int = 0
    num_masked_rows: int = 0
    num_lossy_requests: int = 0
    finished_by_reason: dict[str, int] = {}
    audits_by_outcome: dict[str, int] = {}

    @classmethod
    def empty(cls, *, num_kv_blocks: int, kv_block_size: int, depth: int) -> EngineStats:
        return cls(
            num_kv_blocks=num_kv_blocks,
            kv_block_size=kv_block_size,
            num_steps_by_tokens=[0] * (len(STEP_TOKEN_BOUNDS) + 1),
            draft_tokens_per_position=[0] * depth,
            accepted_tokens_per_position=[0] * depth,
        )

    def count_row_round(self, *, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Counts one row of one round; draft i counts as accepted iff i <= num_accepted."""
        self.num_drafts += num_drafted > 0
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for i in range(num_drafted):
            self.draft_tokens_per_position[i] += 1
            self.accepted_tokens_per_position[i] += i < num_accepted
        rounds = self.row_rounds_by_emitted_tokens
        rounds[num_emitted] = rounds.get(num_emitted, 0) + 1

    def count_step(self, num_tokens: int) -> None:
        self.num_step_tokens += num_tokens
        self.num_steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def count_round(self, depth: int) -> None:
        self.rounds_by_depth[depth] = self.rounds_by_depth.get(depth, 0) + 1

    def count_work(self, seconds: StageSeconds, num_graph_replays: int) -> None:
        for stage in STAGES:
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + getattr(seconds, stage)
        self.num_graph_replays += num_graph_replays

    def count_finished(self, reason: str) -> None:
        self.finished_by_reason[reason] = self.finished_by_reason.get(reason, 0) + 1

    def count_audit(self, outcome: AuditOutcome) -> None:
        self.audits_by_outcome[outcome] = self.audits_by_outcome.get(outcome, 0) + 1
