"""Drives an engine in this process, as the engine process does, and measures its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from headway.engine.build import Engine
from headway.engine.loop import EngineLoop
from headway.engine.protocol.messages import Abort, FromEngine, RoundOutput, Submit, ToEngine, TokenEvent
from headway.engine.protocol.sampling_params import SamplingParams

NUM_WARM_ROUNDS = 3
NUM_SETTLING_ROUNDS = 2  # after the prompts, before the clock starts
MOST_WAIT_SECONDS = 2e-3


def least_new_tokens(depth: int) -> int:
    """Returns the tokens per row that allow a round to be timed even if all drafts are accepted: the prompt's
    first token, rounds that settle, one that starts the clock, one that is timed, and something left for the
    last one, which is not."""
    return 1 + (NUM_SETTLING_ROUNDS + 2) * (depth + 1) + 1


def unread_tokens(depth: int) -> int:
    """Returns the tokens that a row may get in rounds that are launched before the last one is read."""
    return 2 * (depth + 1)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Successive decode rounds with all rows live. context: the average number of tokens in a row's cache."""

    num_rounds: int
    seconds: float
    tokens: int
    context: float


class RoundEnd(NamedTuple):
    """A round of all rows that was read. seconds: the time on the clock; tokens: the tokens of all rows;
    depth: the drafts of each row."""

    seconds: float
    tokens: int
    depth: int


class Post:
    """Two lists in place of the mailbox. Mutable: the bench adds messages, and the loop takes them and
    answers. Since nothing arrives while the loop waits, it waits only for a short time."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        if not self.inbox:
            time.sleep(min(timeout_seconds, MOST_WAIT_SECONDS))
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def take_events(self) -> list[list[TokenEvent]]:
        """Removes all that was sent. Returns the events of each RoundOutput."""
        sent, self.sent = self.sent, []
        return [message.events for message in sent if isinstance(message, RoundOutput)]


class Driver:
    """Mutable: owns the loop; every measurement starts and ends with an idle engine.

    prompts: their first tokens are the prompts of rounds, in turn, and the same ones after each warm-up;
    empty: prompts are random.
    """

    def __init__(self, engine: Engine, *, prompts: Sequence[Sequence[int]] = (), seed: int = 0) -> None:
        self.engine = engine
        self._post = Post()
        self._loop = EngineLoop(engine.scheduler, engine.runner, self._post)
        self._ids = count()
        self._random = random.Random(seed)
        self._prompts = prompts
        self._num_taken = 0

    def warm_up(self, *, batch: int, depth: int, input_len: int) -> None:
        """Runs a few rounds like those to be measured, which compiles kernels and captures rounds."""
        self.engine.scheduler.set_depth(depth)
        self._start_together(self._next_prompts(batch, input_len), NUM_WARM_ROUNDS * (depth + 1))
        self._drain()
        self._num_taken = 0

    def decode(self, *, batch: int, depth: int, input_len: int, output_len: int) -> Rounds:
        """Measures rounds of all rows, until the first row has all its tokens. output_len: `least_new_tokens`
        or more."""
        self.engine.scheduler.set_depth(depth)
        tokens = len(self._start_together(self._next_prompts(batch, input_len), output_len))
        marks: list[tuple[float, int]] = []  # seconds, tokens so far
        for events in self._steps():
            tokens += sum(len(event.token_ids) for event in events)
            if any(event.finish_reason for event in events):
                break
            marks.append((time.perf_counter(), tokens))
        self._drain()
        assert len(marks) > NUM_SETTLING_ROUNDS + 1, f"{len(marks)} rounds: too few new tokens to measure"
        (first_seconds, first_tokens), (last_seconds, last_tokens) = marks[NUM_SETTLING_ROUNDS], marks[-1]
        return Rounds(
            num_rounds=len(marks) - 1 - NUM_SETTLING_ROUNDS,
            seconds=last_seconds - first_seconds,
            tokens=last_tokens - first_tokens,
            context=input_len + (first_tokens + last_tokens) / 2 / batch,
        )

    def rounds(self, prompts: Sequence[list[int]], *, output_len: int) -> Generator[RoundEnd]:
        """Yields the rounds of these requests at the depths that the scheduler is set to, until one has got
        `output_len` tokens or the caller closes the iterator. Then all are aborted, so that every round has
        all rows and none is cut at a limit."""
        most = output_len + unread_tokens(self.engine.info.depth)
        new_tokens = dict.fromkeys(self._start_together(prompts, most), 1)
        try:
            for events in self._steps():
                for event in events:
                    new_tokens[event.request_id] += len(event.token_ids)
                num_tokens = sum(len(event.token_ids) for event in events)
                yield RoundEnd(time.perf_counter(), num_tokens, max(event.num_drafted for event in events))
                if max(new_tokens.values()) >= output_len:
                    return
        finally:
            self._post.inbox += map(Abort, new_tokens)
            self._drain()

    def can_hold(self, *, batch: int, input_len: int, output_len: int) -> bool:
        """Returns whether this number of requests fits into the engine at once."""
        info = self.engine.info
        num_tokens = input_len + output_len
        num_blocks = batch * -(-num_tokens // info.block_size)
        is_short = num_tokens <= info.max_model_len
        return batch <= info.max_running and is_short and num_blocks <= info.num_blocks

    def prefill_seconds(self, *, num_prompts: int, length: int, depth: int) -> float:
        """Returns the time from the prompts' arrival to the last one's first token."""
        self.engine.scheduler.set_depth(depth)
        prompts = [self._random_prompt(length) for _ in range(num_prompts)]
        started = time.perf_counter()
        self._send(prompts, 1)
        self._drain()
        return time.perf_counter() - started

    def closed_loop(
        self, *, num_streams: int, depth: int, input_len: int, output_len: int, num_requests: int
    ) -> float:
        """Returns the output tokens a second where each request that ends is followed by the next one: an
        upper bound for a server with this number of streams. Prompts count in the time, not in the tokens."""
        self.engine.scheduler.set_depth(depth)
        num_left = num_requests - num_streams
        started = time.perf_counter()
        self._submit(num_streams, input_len, output_len)
        for events in self._steps():
            num_next = min(num_left, sum(event.finish_reason is not None for event in events))
            self._submit(num_next, input_len, output_len)
            num_left -= num_next
        return num_requests * output_len / (time.perf_counter() - started)

    def _start_together(self, prompts: Sequence[list[int]], output_len: int) -> list[int]:
        """Computes the prompts, so that rounds begin with the next step. Returns the ids of the requests,
        which have one token each.

        Otherwise the first rows would have all their tokens before the last of long prompts is computed.
        """
        batch, input_len = len(prompts), max(map(len, prompts))
        assert self.can_hold(batch=batch, input_len=input_len, output_len=output_len), (
            f"{batch} rows of {self.engine.info.max_running}, {input_len} + {output_len} tokens each, do not fit at once"
        )
        self.engine.scheduler.hold_rounds()
        ids = self._send(prompts, output_len)
        num_started = 0
        for events in self._steps():
            num_started += len(events)
            if num_started == batch:
                break
        self.engine.scheduler.release_rounds()
        return ids

    def _submit(self, batch: int, input_len: int, output_len: int) -> None:
        self._send(self._next_prompts(batch, input_len), output_len)

    def _send(self, prompts: Sequence[list[int]], output_len: int) -> list[int]:
        """Returns the ids of the requests."""
        messages = [
            Submit(
                request_id=next(self._ids),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, seed=self._random.getrandbits(64)),
                max_tokens=output_len,
            )
            for prompt in prompts
        ]
        self._post.inbox += messages
        return [message.request_id for message in messages]

    def _next_prompts(self, batch: int, length: int) -> list[list[int]]:
        return [self._next_prompt(length) for _ in range(batch)]

    def _next_prompt(self, length: int) -> list[int]:
        if not self._prompts:
            return self._random_prompt(length)
        prompt = self._prompts[self._num_taken % len(self._prompts)]
        self._num_taken += 1
        assert len(prompt) >= length, (len(prompt), length)
        return list(prompt[:length])

    def _random_prompt(self, length: int) -> list[int]:
        return self._random.choices(range(self.engine.info.vocab_size), k=length)

    def _steps(self) -> Iterator[list[TokenEvent]]:
        """Yields the result of each prefill and round until no request is left; a step may read two short
        rounds."""
        while self._post.inbox or self.engine.scheduler.has_work:
            yield from self._step()

    def _drain(self) -> None:
        for _ in self._steps():
            pass

    def _step(self) -> list[list[TokenEvent]]:
        self._loop.step()
        outputs = self._post.take_events()
        faults = [event.error for events in outputs for event in events if event.error is not None]
        assert not faults, faults
        return outputs
