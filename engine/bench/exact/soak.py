"""Serves many requests that arrive at random, twice in different orders, and compares both times by a hash of
each answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.engine.bench.exact.compare import Difference, difference, digest
from headway.engine.bench.exact.session import Answer, Arrival, Session
from headway.engine.bench.exact.texts import Job, Prompts, Text, random_length

# Arrivals are a Poisson process over steps whose rate changes after this number of arrivals, between few
# requests and a full engine.
PHASE_ARRIVALS, RATES = 40, (0.1, 0.5, 1.0, 4.0)
MOST_IN_ENGINE = 2  # times the rows
SHARED_PROMPTS = 64  # whose beginnings half of the prompts have, so that they are found in the cache
TOLD_EVERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SoakOutcome:
    """The result of a soak. num_differing: the requests whose second answer differs from the first. first:
    the first difference of such an answer from a run alone; None: there is none, so that the first answer was
    wrong. seconds: those of both passes."""

    num_requests: int
    num_differing: int
    num_tokens: int
    first_request: int | None
    first: Difference | None
    seconds: tuple[float, float]


class Soak:
    """Mutable: keeps a hash for each request, and the second answer of the first request that differs."""

    def __init__(
        self,
        session: Session,
        prompts: Prompts,
        *,
        texts: Sequence[Text],
        predictions: Mapping[int, list[int]],
        num_requests: int,
        num_tokens: int,
        input_len: int,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        """texts: those that requests repeat, cut at other lengths; empty: each request has one of its own.
        predictions: the predicted outputs of texts, by their indices."""
        self._texts, self._predictions = texts, predictions
        self._session, self._prompts, self._tell = session, prompts, tell
        self._num_requests, self._num_tokens = num_requests, num_tokens
        self._input_len, self._seed = input_len, seed
        self._digests: dict[int, bytes] = {}
        self._differing: list[int] = []
        self._answer: Answer | None = None
        self._num_answered_tokens = 0
        self._told = time.monotonic()

    def run(self) -> SoakOutcome:
        seconds = [self._pass(number, take) for number, take in enumerate((self._keep, self._compare))]
        first = None if self._answer is None else self._explain(self._differing[0], self._answer)
        return SoakOutcome(
            self._num_requests, len(self._differing), self._num_answered_tokens,
            self._differing[0] if self._differing else None, first, (seconds[0], seconds[1]),
        )  # fmt: skip

    def _pass(self, number: int, take: Callable[[int, Answer], None]) -> float:
        started = time.monotonic()
        most = MOST_IN_ENGINE * self._session.engine.info.max_running
        done = 0

        def tell(key: int, answer: Answer) -> None:
            nonlocal done
            done += 1
            self._num_answered_tokens += len(answer.token_ids)
            take(key, answer)
            if time.monotonic() - self._told > TOLD_EVERY_SECONDS:
                self._told = time.monotonic()
                self._tell(f"soak, pass {number + 1} of 2: {done:,} of {self._num_requests:,} requests")

        self._session.serve(self._arrivals(number), tell, most=most)
        return time.monotonic() - started

    def _arrivals(self, number: int) -> Iterator[Arrival]:
        """Yields all requests in an order of the pass's own; meanwhile the depth and the size of chunks
        change, too."""
        chance = random.Random(f"{self._seed}-arrivals-{number}")
        order = chance.sample(range(self._num_requests), self._num_requests)
        # Scored requests keep prompts out of the passes of rounds: half of the time there are none.
        by_kind = [[i for i in order if self._is_scored(i) == is_scored] for is_scored in (True, False)]
        info = self._session.engine.info
        usual = info.max_running / 2 / self._num_tokens  # arrivals at a step that keep half of the rows busy
        now, before, position = 0.0, 0, 0
        rate, is_scored = usual, True
        while any(by_kind):
            if position % PHASE_ARRIVALS == 0:
                rate = usual * chance.choice(RATES)
                is_scored = not is_scored
                self._session.choose(
                    chance.randint(0, info.depth), chance.choice((None, info.block_size * 2))
                )
            own = by_kind[0] if is_scored else by_kind[1]
            index = (own or by_kind[0] or by_kind[1]).pop()
            now += chance.expovariate(rate)
            yield int(now) - before, index, self._job(index, number)
            before = int(now)
            position += 1

    def _is_scored(self, index: int) -> bool:
        return index % 2 == 0

    def _text(self, index: int) -> Text:
        """Returns the text of a request, the same each time."""
        if self._texts:
            return self._texts[index % len(self._texts)]
        chance = random.Random(f"{self._seed}-soak-{index}")
        length = random_length(chance, self._input_len, self._session.border)
        if chance.random() < 0.5:
            chance = random.Random(f"{self._seed}-shared-{chance.randrange(SHARED_PROMPTS)}")
        return Text(index, self._prompts(chance, length), chance.random() < 0.5)

    def _job(self, index: int, number: int) -> Job:
        """Returns a run of the request; now and then it is preempted, at another place each time."""
        chance = random.Random(f"{self._seed}-{index}-{number}")
        text, num_tokens = self._text(index), 1 + index % self._num_tokens
        preempt_at = chance.randrange(num_tokens) if chance.random() < 0.1 else None
        sampling = text.sampling(is_scored=self._is_scored(index))
        prediction = self._predictions.get(text.index, [])
        return Job(text.prompt, sampling, num_tokens, "soak", preempt_at=preempt_at, prediction=prediction)

    def _keep(self, key: int, answer: Answer) -> None:
        self._digests[key] = digest(answer)

    def _compare(self, key: int, answer: Answer) -> None:
        if digest(answer) != self._digests[key]:
            self._differing.append(key)
            self._answer = self._answer or answer

    def _explain(self, index: int, answer: Answer) -> Difference | None:
        """Compares the second answer with a run of the request at depth 0, alone, with a cold cache."""
        self._session.choose(0, None)
        text = self._text(index)
        job = Job(text.prompt, text.sampling(is_scored=True), len(answer.token_ids), f"alone-{index}")
        wanted = self._session.run([job])[0]
        return difference(index, index, wanted, answer, "the second pass of the soak")
