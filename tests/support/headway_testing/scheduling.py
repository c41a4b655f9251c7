"""A scheduler before a simulated device, driven step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headway.engine.grammar.guide import Guide
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler
from headway_testing.fake_runner import VOCAB_SIZE, FakeHandle, FakeRunner, oracle_output


class ScheduledDevice:
    """Runs steps. `launch` and `read` are called apart where a step is to stay unread; `step` does both."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 256,
        has_draft_head: bool = True,
        accept: Callable[[int], int] = lambda num_valid: num_valid,
        prefill: PrefillPolicy | None = None,
        num_checkpoints: int | None = None,
        prompt_grid: int | None = None,
        **options: int | bool | str,
    ) -> None:
        self.config = EngineConfig(model_path="none", **options)
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            drafter=DRAFTER_TRAITS["mtp" if has_draft_head else "none"],
            prefill=prefill,
            num_checkpoints=num_checkpoints,
            prompt_grid=prompt_grid,
            clock=lambda: 0.0,
        )
        self.blocks = self.scheduler.state.blocks
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            has_draft_head=has_draft_head,
            max_depth=self.config.depth if has_draft_head else 0,
            accept=accept,
            is_published=self.blocks.is_published,
            keeps_row_state=num_checkpoints is not None,
        )
        self._in_flight: deque[tuple[Plan, FakeHandle]] = deque()
        self._num_requests = 0

    @property
    def has_unread(self) -> bool:
        """Tells whether a step was launched whose result was not read."""
        return bool(self._in_flight)

    def add(
        self,
        prompt: int | list[int],
        *,
        max_tokens: int = 8,
        stop: tuple[int, ...] = (),
        max_draft_tokens: int | None = None,
        salt: str = "",
        priority: int = 0,
        group_id: int | None = None,
        guide: Guide | None = None,
        **sampling: object,
    ) -> Request:
        """Adds a request. prompt: token ids, or how many of its own."""
        request_id = self._num_requests
        if isinstance(prompt, int):
            prompt = [(11 * request_id + i) % VOCAB_SIZE for i in range(prompt)]
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**({"seed": request_id} | sampling)),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop),
            max_draft_tokens=max_draft_tokens,
            cache_salt=salt,
            priority=priority,
            group_id=group_id,
            guide=guide,
        )
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def launch(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._run(plan)))
        return plan

    def _run(self, plan: Plan) -> FakeHandle:
        if not plan.guided_rows:
            return self.runner.launch(plan)
        begun = self.runner.begin(plan)
        while self._in_flight:
            self.read()
        return begun.finish(self.scheduler.fill_masks(plan, begun.drafts(), begun.buffer))

    def read(self) -> list[TokenEvent]:
        plan, handle = self._in_flight.popleft()
        return self.scheduler.update(plan, handle.result())

    def step(self) -> tuple[Plan, list[TokenEvent]]:
        plan = self.launch()
        assert plan is not None, "there is nothing to do"
        return plan, self.read()

    def step_until_round(self) -> tuple[Plan, list[TokenEvent]]:
        """Takes steps up to the first that runs a decode round; returns its plan and its events."""
        return self._step_until(lambda plan: bool(plan.decode_request_ids))

    def step_until_prompts(self) -> tuple[Plan, list[TokenEvent]]:
        """Takes steps up to the first that computes prompt tokens; returns its plan and its events."""
        return self._step_until(lambda plan: bool(plan.prefill))

    def _step_until(self, is_wanted: Callable[[Plan], bool]) -> tuple[Plan, list[TokenEvent]]:
        """Takes steps until one is wanted: prompts and rounds take turns."""
        plan, events = self.step()
        if not is_wanted(plan):
            plan, events = self.step()
        assert is_wanted(plan), f"two steps in a row left it out: {plan}"
        return plan, events

    def drain(self) -> list[Plan]:
        """Takes steps until all is done, with one step always in flight."""
        plans: list[Plan] = []
        while self.scheduler.has_work or self._in_flight:
            plan = self.launch()
            if plan is not None:
                plans.append(plan)
            assert plan is not None or self._in_flight, "requests wait, but nothing moves"
            while len(self._in_flight) > (plan is not None):
                self.read()
        return plans


def oracle(request: Request) -> list[int]:
    return oracle_output(
        request.prompt_token_ids, request.max_tokens, request.stop_token_ids, request.sampling.seed
    )
