"""An engine for tests of the HTTP side: the client's interface, with scripted tokens and no process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from headway.engine import (
    EngineDeadError,
    EngineInfo,
    EngineStats,
    FinishReason,
    HeadwayError,
    Submit,
    TokenEvent,
    TokenLogprobs,
)
from headway.server.engine.client import EngineStatus, State
from headway.server.engine.flights import Receiver

INFO = EngineInfo(
    architecture="FakeForCausalLM", device="cpu", dtype="float32", num_parameters=1_000, weights_bytes=4_000,
    kv_cache_bytes=8_000, num_blocks=64, block_size=16, max_model_len=256, max_running=8, vocab_size=600,
    depth=3, has_draft_head=True, drafter="mtp",
)  # fmt: skip


def repeat_prompt(request: Submit) -> list[int]:
    """Repeats the prompt's ids. This is the default script."""
    return list(itertools.islice(itertools.cycle(request.prompt_token_ids), request.max_tokens))


class FakeEngine:
    """Each round hands a request `tokens_per_round` tokens of its script; the last of them is no draft.

    Mutable: tests set the knobs and read `submitted`, `aborted` and `running`.
    """

    def __init__(self, info: EngineInfo | None = INFO) -> None:
        self.info = info
        self.state: State = "serving"
        self.stats = EngineStats(num_kv_blocks=64)
        self.num_restarts = 0
        self.script: Callable[[Submit], list[int]] = repeat_prompt
        self.tokens_per_round = 3
        self.draft_start = 0  # tokens of a round that come before its drafts
        self.round_seconds = 0.0
        self.estimated_seconds = (0.0, 0.0)  # as each event tells them: of the round, without drafts
        self.queue_seconds = 0.0  # as the first event tells it; it is not waited for
        self.num_cached: Callable[[Submit], int] = lambda request: 0  # as the first event tells it
        self.stall_after: int | None = None  # tokens, then silence
        self.die_after: int | None = None  # tokens, then EngineDeadError for all
        self.refusal: TokenEvent | None = None  # its request_id is replaced
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.depths: list[int] = []  # as they were set
        self.lasting_depth: int | None = None
        self.running: dict[int, asyncio.Task[None]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._ids = itertools.count()

    def status(self) -> EngineStatus:
        is_alive = self.state in ("serving", "paused", "loading", "draining")
        return EngineStatus(self.state, "serve", 1.0, 7, 0.1, is_alive, self.num_restarts)

    def pause(self) -> None:
        self.state = "paused"

    def resume(self) -> None:
        self.state = "serving"

    def set_depth(self, depth: int, *, survives_restart: bool = True) -> None:
        self.depths.append(depth)
        self.lasting_depth = depth if survives_restart else None

    def new_request_id(self) -> int:
        return next(self._ids)

    def submit(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        if self.state not in ("serving", "paused", "draining"):
            raise EngineDeadError(f"the engine is {self.state}")
        frame = msgspec.msgpack.encode(list(requests))  # what cannot cross to a real engine fails here too
        for request in msgspec.msgpack.decode(frame, type=list[Submit]):
            self.submitted.append(request)
            self._receivers[request.request_id] = receiver
            self.running[request.request_id] = asyncio.create_task(self._run(request, receiver))

    def abort(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        for request_id in request_ids:
            if (task := self.running.pop(request_id, None)) is not None:
                task.cancel()
                self.aborted.append(request_id)

    def fail_all(self, error: HeadwayError) -> None:
        for request_id in list(self.running):
            self.running.pop(request_id).cancel()
            self._receivers[request_id].fail(error)

    async def _run(self, request: Submit, receiver: Receiver) -> None:
        if self.refusal is not None:
            self._end(request, receiver, self.refusal)
            return
        done = len(request.output_token_ids or ())
        script = self.script(request)[: request.max_tokens]
        while True:
            await asyncio.sleep(self.round_seconds)
            while self.state == "paused":
                await asyncio.sleep(0.001)
            if self.die_after is not None and done >= self.die_after:
                self.fail_all(EngineDeadError("the engine ended while this request ran: a test"))
                return
            if self.stall_after is not None and done >= self.stall_after:
                await asyncio.Event().wait()
            tokens = script[done : done + self.tokens_per_round]
            done += len(tokens)
            reason = self._reason(request, tokens, is_at_end=done >= len(script))
            event = _event(
                request, _up_to_stop(request, tokens), reason, self.draft_start, is_first=done == len(tokens)
            )
            if done == len(tokens):
                event = msgspec.structs.replace(
                    event, queue_seconds=self.queue_seconds, num_cached=self.num_cached(request)
                )
            if reason is not None:
                self.running.pop(request.request_id, None)
            round_seconds, undrafted_seconds = self.estimated_seconds
            event = msgspec.structs.replace(
                event, round_seconds=round_seconds, undrafted_seconds=undrafted_seconds
            )
            receiver.put(event)
            if reason is not None:
                return

    def _reason(self, request: Submit, tokens: list[int], *, is_at_end: bool) -> FinishReason | None:
        if any(i in request.stop_token_ids for i in tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if is_at_end else None

    def _end(self, request: Submit, receiver: Receiver, refusal: TokenEvent) -> None:
        self.running.pop(request.request_id, None)
        receiver.put(msgspec.structs.replace(refusal, request_id=request.request_id))


def _up_to_stop(request: Submit, tokens: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens, start=1) if token in request.stop_token_ids]
    return tokens[: ends[0]] if ends else tokens


def _event(
    request: Submit, tokens: list[int], reason: FinishReason | None, draft_start: int, *, is_first: bool
) -> TokenEvent:
    return TokenEvent(
        request.request_id,
        tokens,
        reason,
        num_drafted=3,
        num_accepted=max(0, len(tokens) - 1 - draft_start),
        logprobs=fake_logprobs(tokens, request.sampling.num_logprobs),
        prompt_logprobs=fake_logprobs(
            request.prompt_token_ids[1:], request.sampling.num_prompt_logprobs if is_first else None
        ),
        draft_start=draft_start,
    )


def fake_logprob(token_id: int) -> float:
    return -1 - token_id / 8


def fake_logprobs(tokens: list[int], num_top: int | None) -> TokenLogprobs | None:
    """Makes the ids 40, 41, .. the most probable at each position, with -0.5, -1.0, .."""
    if num_top is None:
        return None
    ids, values = range(40, 40 + num_top), [-0.5 * (i + 1) for i in range(num_top)]
    logprobs = [fake_logprob(i) for i in tokens]
    return TokenLogprobs(num_top, logprobs, [9] * len(tokens), [*ids] * len(tokens), values * len(tokens))
