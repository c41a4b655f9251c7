"""Runs requests on an engine in this process, as its own process does, and keeps their tokens and
log-probabilities."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from headway.engine.bench.exact.texts import Job, made_up_table
from headway.engine.bench.measure import Post
from headway.engine.build import Engine
from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.loop import Begun, EngineLoop, Handle, Launcher
from headway.engine.parallel.ranks import Ranks
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.messages import Submit, TokenEvent
from headway.engine.scheduling.plan import Plan

Arrival = tuple[int, int, Job]  # steps after the arrival before it, key, job


@dataclass(slots=True)
class Answer:
    """The output of a request. scores: of each token its log-probability and those of the most probable
    tokens, in float64, which holds float32 exactly; empty where none were asked for. Mutable: the session is
    its only writer."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    scores: array[float] = field(default_factory=lambda: array("d"))
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    was_preempted: bool = False

    @property
    def width(self) -> int:
        """Scores of each token."""
        return len(self.scores) // max(len(self.token_ids), 1)

    def scores_of(self, place: int) -> tuple[float, ...]:
        return tuple(self.scores[place * self.width : (place + 1) * self.width])


@dataclass(slots=True)
class _Running:
    key: int
    job: Job
    answer: Answer = field(default_factory=Answer)


class _CountingRunner:
    """Counts what the runner is given. Mutable: the loop is its only caller."""

    def __init__(self, runner: Launcher) -> None:
        self._runner = runner
        self.num_mixed = self.num_masked = 0

    def launch(self, plan: Plan) -> Handle:
        self.num_mixed += plan.is_mixed
        return self._runner.launch(plan)

    def begin(self, plan: Plan) -> Begun:
        self.num_masked += 1
        self.num_mixed += plan.is_mixed
        return self._runner.begin(plan)


class Session:
    """Mutable: owns the engine and its loop; each call of `serve` begins and ends with an idle engine.

    prompt_grid: see ModelSpec. counting: the counts of the running engine.
    """

    def __init__(self, start: Callable[[], Engine], start_again: Callable[[], Engine]) -> None:
        """start: makes the engine. start_again: another one, at `restart`."""
        self._start_again = start_again
        self._num_submitted = 0
        self._running: dict[int, _Running] = {}
        self._ranks: Ranks | None = None
        self._begin(start())

    def restart(self) -> None:
        """Frees the engine and starts another one, which shares nothing with it."""
        self.close()
        del self.engine, self.counting, self._loop
        gc.collect()
        self._begin(self._start_again())

    def close(self) -> None:
        """Ends the other ranks of the engine, if it has any."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _begin(self, engine: Engine) -> None:
        self.engine, self._ranks = engine, engine.ranks
        self._post = Post()
        self._own_prefill = engine.scheduler.prefill
        self.prompt_grid = engine.runner.model.spec.prompt_grid
        vocab_size = engine.info.vocab_size
        compiler = GrammarCompiler(made_up_table(vocab_size), vocab_size)
        self.counting = _CountingRunner(engine.runner)
        self._loop = EngineLoop(engine.scheduler, self.counting, self._post, compiler=compiler)

    @property
    def border(self) -> int:
        """The tokens at whose multiples cached prefixes may end."""
        return max(self.prompt_grid or 1, self.engine.info.block_size)

    def choose(self, depth: int, chunk: int | None) -> None:
        """Sets the depth of rounds and the prompt tokens of steps, which are at least the model's prompt
        grid; None: the engine's own policy."""
        scheduler, own = self.engine.scheduler, self._own_prefill
        scheduler.set_depth(depth)
        if chunk is None:
            scheduler.set_prefill(own)
        else:
            chunk = max(chunk, self.prompt_grid or 1)
            idle, separate, mixed = (min(chunk, size) for size in (own.idle, own.separate, own.mixed))
            scheduler.set_prefill(replace(own, idle=idle, separate=separate, mixed=mixed))

    def run(self, jobs: Sequence[Job], gaps: Sequence[int] = ()) -> list[Answer]:
        """Returns the answers in the order of the jobs. gaps: steps before each arrival; empty: all arrive at
        once."""
        answers: dict[int, Answer] = {}
        waits = gaps or [0] * len(jobs)
        arrivals = [(wait, key, job) for key, (wait, job) in enumerate(zip(waits, jobs, strict=True))]
        self.serve(arrivals, answers.__setitem__)
        return [answers[key] for key in range(len(jobs))]

    def serve(
        self, arrivals: Iterable[Arrival], tell: Callable[[int, Answer], None], *, most: int | None = None
    ) -> None:
        """Serves until all have ended. tell: called with the key and the answer of each. most: requests that
        are in the engine at once, beyond which arrivals are held up."""
        waiting = iter(arrivals)
        upcoming = next(waiting, None)
        wait = 0 if upcoming is None else upcoming[0]
        while upcoming is not None or self._running:
            while upcoming is not None and wait <= 0 and (most is None or len(self._running) < most):
                self._submit(*upcoming[1:])
                upcoming = next(waiting, None)
                wait = 0 if upcoming is None else upcoming[0]
            wait -= 1
            self._step(tell)

    def _submit(self, key: int, job: Job) -> None:
        request_id, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._running[request_id] = _Running(key, job)
        self._post.inbox.append(
            Submit(
                request_id=request_id,
                prompt_token_ids=job.prompt,
                sampling=job.sampling,
                max_tokens=job.max_tokens,
                cache_salt=job.salt,
                grammar=job.grammar,
                prediction_token_ids=job.prediction,
            )
        )

    def _step(self, tell: Callable[[int, Answer], None]) -> None:
        self._preempt()
        self._loop.step()
        for event in chain(*self._post.take_events()):
            self._take(event, tell)

    def _preempt(self) -> None:
        """Preempts the requests that have reached their places of preemption."""
        for request_id, running in self._running.items():
            job, answer = running.job, running.answer
            is_due = job.preempt_at is not None and len(answer.token_ids) >= job.preempt_at
            if is_due and not answer.was_preempted:
                answer.was_preempted = self.engine.scheduler.preempt(
                    request_id, forgets_blocks=job.forgets_blocks
                )

    def _take(self, event: TokenEvent, tell: Callable[[int, Answer], None]) -> None:
        if event.error is not None:
            raise HeadwayError(f"the engine failed a request of the check: {event.error}")
        running = self._running[event.request_id]
        answer = running.answer
        answer.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            own, num_top = event.logprobs, event.logprobs.num_top
            for place, logprob in enumerate(own.logprobs):
                answer.scores.append(logprob)
                answer.scores.extend(own.top_logprobs[place * num_top : (place + 1) * num_top])
        answer.num_drafted += event.num_drafted
        answer.num_accepted += event.num_accepted
        answer.num_cached = event.num_cached or answer.num_cached
        if event.finish_reason is not None:
            del self._running[event.request_id]
            tell(running.key, answer)
