"""An engine inside the test's own process: real scheduler, runner and loop, with lists for a mailbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from headway.engine.bench.measure import Post
from headway.engine.build import Engine, assemble
from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.loop import Begun, EngineLoop, Handle, Launcher
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.logprobs import TokenLogprobs, join
from headway.engine.protocol.messages import RoundOutput, Submit, TokenEvent
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.audit import Auditor
from headway.engine.scheduling.plan import Plan, StepResult
from headway.engine.speculation.drafter import Drafter

GREEDY = SamplingParams(temperature=0.0)


class Late:
    """A step's result that the loop must not wait for before it launches the next step."""

    def __init__(self, handle: Handle, *, is_late: bool) -> None:
        self._handle = handle
        self._is_late = is_late

    def is_ready(self) -> bool:
        return not self._is_late

    def wait(self) -> None:
        self._handle.wait()

    def result(self) -> StepResult:
        return self._handle.result()


class LateBegun:
    """The first half of such a step."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self.buffer = begun.buffer

    def drafts(self) -> list[list[int]]:
        return self._begun.drafts()

    def finish(self, entries: Mapping[int, int]) -> Late:
        return Late(self._begun.finish(entries), is_late=True)


class LateRunner:
    """A runner whose every result is read only after the next step was launched, as on a busy GPU."""

    def __init__(self, runner: Launcher) -> None:
        self._runner = runner

    def launch(self, plan: Plan) -> Late:
        return Late(self._runner.launch(plan), is_late=True)

    def begin(self, plan: Plan) -> LateBegun:
        return LateBegun(self._runner.begin(plan))


@dataclass
class Output:
    """The output of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def logprobs(self) -> TokenLogprobs:
        """Returns those of all token_ids."""
        return join([event.logprobs for event in self.events if event.logprobs is not None])

    @property
    def prompt_logprobs(self) -> TokenLogprobs | None:
        assert all(event.prompt_logprobs is None for event in self.events[1:]), (
            "they come with the first event"
        )
        return self.events[0].prompt_logprobs


class LocalEngine:
    """Submits, runs and collects requests, which are numbered from 0 in the order of submission."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        reads_late: bool = False,
        token_table: TokenTable | None = None,
    ) -> None:
        self.engine: Engine = assemble(config, progress=lambda _: None, drafter=drafter)
        self.post = Post()
        runner = self.engine.runner
        launcher = LateRunner(runner) if reads_late else runner
        compiler = GrammarCompiler(token_table, self.engine.info.vocab_size)
        auditor = Auditor(self.engine.scheduler, config.audit_rate)
        self.loop = EngineLoop(self.engine.scheduler, launcher, self.post, compiler=compiler, auditor=auditor)
        self.outputs: dict[int, Output] = {}
        self._ids = count()

    def submit(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Iterable[int] = (),
        max_draft_tokens: int | None = None,
        prediction: Iterable[int] = (),
        cache_salt: str = "",
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> int:
        request_id = next(self._ids)
        self.outputs[request_id] = Output()
        self.post.inbox.append(
            Submit(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling=sampling,
                max_tokens=max_tokens,
                stop_token_ids=list(stop_token_ids),
                max_draft_tokens=max_draft_tokens,
                prediction_token_ids=list(prediction),
                cache_salt=cache_salt,
                priority=priority,
                grammar=grammar,
            )
        )
        return request_id

    def step(self) -> None:
        self.loop.step()
        sent, self.post.sent = self.post.sent, []
        for message in sent:
            for event in message.events if isinstance(message, RoundOutput) else ():
                output = self.outputs[event.request_id]
                output.token_ids += event.token_ids
                output.finish_reason = event.finish_reason or output.finish_reason
                output.num_drafted += event.num_drafted
                output.num_accepted += event.num_accepted
                output.events.append(event)

    def run(self, max_steps: int = 100_000) -> dict[int, Output]:
        """Takes steps until every request has finished."""
        for _ in range(max_steps):
            if all(output.finish_reason for output in self.outputs.values()):
                return self.outputs
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.outputs}")

    def generate(self, prompt: Iterable[int], **kwargs: object) -> list[int]:
        """Runs one request alone."""
        request_id = self.submit(prompt, **kwargs)  # type: ignore[arg-type]
        self.run()
        return self.outputs[request_id].token_ids
