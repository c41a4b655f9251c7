"""Observes requests in the API process: latencies, and sizes at the end of each choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram

from headway.server.grammar.frames import KINDS, Kind
from headway.server.json_schema import CONSTRAINTS
from headway.server.telemetry.history import Buckets

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000,
)  # fmt: skip
COMPILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
OUTCOMES = ("compiled", "cached", "refused")
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
PARSED, MALFORMED = "parsed", "malformed"
OTHER_KEYWORD = "other"


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice that has ended normally. Times are seconds from the request's arrival.

    queue_seconds: from the choice's arrival at the engine to its first admission. max_tokens: its limit.
    """

    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    queue_seconds: float
    first_token_seconds: float
    last_token_seconds: float


class RequestMetrics:
    """Mutable: generations are its only writers. Every histogram has one sample for each choice, unless it
    says otherwise."""

    def __init__(self, registry: CollectorRegistry, tool_format: str) -> None:
        """tool_format: the name of the model's format of tool calls."""
        self._registry = registry
        self.time_to_first_token = self._histogram(
            "headway_time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.queue_time = self._histogram(
            "headway_queue_time_seconds", "From a choice's arrival at the engine to its first admission."
        )
        self.prefill_time = self._histogram(
            "headway_prefill_time_seconds", "From a choice's first admission to its first token."
        )
        self.decode_time = self._histogram(
            "headway_decode_time_seconds", "From a choice's first token to its last."
        )
        self.inference_time = self._histogram(
            "headway_inference_time_seconds", "From a choice's first admission to its last token."
        )
        self.time_per_output_token = self._histogram(
            "headway_time_per_output_token_seconds",
            "(End to end - time to first token) / (tokens - 1), of requests with two tokens or more.",
            TOKEN_BUCKETS,
        )
        self.chunk_gap = self._histogram(
            "headway_chunk_gap_seconds", "Between two pieces of one choice's output.", TOKEN_BUCKETS
        )
        self.end_to_end = self._histogram(
            "headway_request_duration_seconds", "From the request's arrival to its last token."
        )
        self.prompt_tokens = self._histogram(
            "headway_request_prompt_tokens", "Tokens of a choice's prompt.", LENGTH_BUCKETS
        )
        self.generation_tokens = self._histogram(
            "headway_request_generation_tokens", "Tokens that a choice got.", LENGTH_BUCKETS
        )
        self.max_tokens = self._histogram(
            "headway_request_max_tokens", "Tokens that a choice was allowed at most.", LENGTH_BUCKETS
        )
        self.longest_choice = self._histogram(
            "headway_request_longest_choice_tokens",
            "Tokens of the longest choice of a prompt, once all its choices have ended.",
            LENGTH_BUCKETS,
        )
        self.choices = self._histogram(
            "headway_request_choices", "Choices of a prompt, once all have ended.", CHOICES_BUCKETS
        )
        self._tool_format = tool_format
        self._tool_calls = self._counter(
            "headway_tool_calls",
            "Calls of tools in answers to requests with tools, by the form of the model's output and by outcome: parsed; or "
            "malformed, which is told as content.",
            format=(tool_format,),
            outcome=(PARSED, MALFORMED),
        )
        self.grammar_compile_time = self._histogram(
            "headway_grammar_compile_seconds",
            "Checking and compiling a grammar that a request asked for, refused ones included.",
            COMPILE_BUCKETS,
        )
        self.grammars = self._counter(
            "headway_grammars",
            "Grammars that requests asked for, by kind and outcome.",
            kind=KINDS,
            outcome=OUTCOMES,
        )
        self.dropped_keywords = self._counter(
            "headway_dropped_schema_keywords",
            "Keywords of JSON schemas that were not enforced, because they cannot be and the request was not strict.",
            keyword=(*sorted(CONSTRAINTS), OTHER_KEYWORD),
        )

    def count_tool_calls(self, num_parsed: int, num_malformed: int) -> None:
        self._tool_calls.labels(self._tool_format, PARSED).inc(num_parsed)
        self._tool_calls.labels(self._tool_format, MALFORMED).inc(num_malformed)

    def observe_grammar(self, kind: Kind, outcome: str, seconds: float | None = None) -> None:
        """outcome: one of OUTCOMES. seconds: the time of the compilation; None if it was cached."""
        self.grammars.labels(kind, outcome).inc()
        if seconds is not None:
            self.grammar_compile_time.observe(seconds)

    def count_dropped_keyword(self, keyword: str) -> None:
        """Counts a keyword. Clients choose names freely, so that unknown ones are counted together."""
        self.dropped_keywords.labels(keyword if keyword in CONSTRAINTS else OTHER_KEYWORD).inc()

    def observe_choice(self, choice: FinishedChoice) -> None:
        """Observes a choice. The two processes' clocks differ: a prefill that seems to end before it began
        took no time."""
        decode_seconds = choice.last_token_seconds - choice.first_token_seconds
        prefill_seconds = max(0.0, choice.first_token_seconds - choice.queue_seconds)
        self.time_to_first_token.observe(choice.first_token_seconds)
        self.prefill_time.observe(prefill_seconds)
        self.decode_time.observe(decode_seconds)
        self.inference_time.observe(prefill_seconds + decode_seconds)
        self.end_to_end.observe(choice.last_token_seconds)
        if choice.num_tokens > 1:
            self.time_per_output_token.observe(decode_seconds / (choice.num_tokens - 1))
        self.prompt_tokens.observe(choice.num_prompt_tokens)
        self.generation_tokens.observe(choice.num_tokens)
        self.max_tokens.observe(choice.max_tokens)

    def observe_prompt(self, num_choices: int, num_longest_tokens: int) -> None:
        """Observes a prompt whose choices have all ended."""
        self.choices.observe(num_choices)
        self.longest_choice.observe(num_longest_tokens)

    def latencies(self) -> dict[str, Buckets]:
        """Returns the latencies by the names of the history's points."""
        histograms = {
            "time_to_first_token": self.time_to_first_token,
            "time_per_output_token": self.time_per_output_token,
            "chunk_gap": self.chunk_gap,
            "end_to_end": self.end_to_end,
        }
        return {name: _buckets(histogram) for name, histogram in histograms.items()}

    def _histogram(
        self, name: str, documentation: str, buckets: tuple[float, ...] = LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(name, documentation, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, documentation: str, **values: Iterable[str]) -> Counter:
        """Returns a counter whose labels have these values. Every combination is shown from the start."""
        counter = Counter(name, documentation, [*values], registry=self._registry)
        for labels in product(*values.values()):
            counter.labels(*labels)
        return counter


def _buckets(histogram: Histogram) -> Buckets:
    samples = [s for family in histogram.collect() for s in family.samples if s.name.endswith("_bucket")]
    return [(float(s.labels["le"]), s.value) for s in samples]
