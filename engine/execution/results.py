"""The results of a launched step on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch

from headway.engine.execution.host_ring import RingSlot
from headway.engine.execution.step import NUM_STAMPS, lines_of
from headway.engine.protocol.logprobs import TokenLogprobs, unpack
from headway.engine.protocol.stats import StageSeconds
from headway.engine.scheduling.plan import StepResult

Wanted = TypeVar("Wanted")
# {index of the line: top tokens wanted} and, line for line, [lines, window, 2 + 2 * top] float32
Scores = tuple[dict[int, int], torch.Tensor]


@dataclass(slots=True)
class DeviceResults:
    """Mutable: the runner fills it while it launches. Results that no request asked for stay None."""

    device: torch.device
    depth: int
    faults: tuple[tuple[int, str], ...] = ()
    first_tokens: torch.Tensor | None = None  # [last chunks] int64
    round: RingSlot | None = None  # of [NUM_STAMPS + rows * (depth + 2)], as RoundOutcome packs it
    prefill_stamps: torch.Tensor | None = None  # [2] int64: nanoseconds at begin and end
    is_replayed: bool = False
    first_logprobs: Scores | None = None  # lines are last chunks, window 1
    emitted_logprobs: Scores | None = None  # lines are rows, window depth + 1
    prompt_logprobs: list[tuple[int, torch.Tensor] | None] | None = None  # by chunk: top tokens, scores


class StepHandle:
    """The result of a launched step, which may still be running. Mutable: drops the event after the wait for
    it."""

    def __init__(self, results: DeviceResults) -> None:
        self._on_host = replace(
            results,
            first_tokens=_to_host(results.first_tokens),
            prefill_stamps=_to_host(results.prefill_stamps),
            first_logprobs=_scores_to_host(results.first_logprobs),
            emitted_logprobs=_scores_to_host(results.emitted_logprobs),
            prompt_logprobs=[_scores_to_host(scored) for scored in results.prompt_logprobs or ()],
        )
        self._event: torch.Event | None = None
        if results.device.type == "cuda":
            self._event = torch.Event(device=results.device)
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """The one place where the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def result(self) -> StepResult:
        """Waits for the device, and returns the result."""
        self.wait()
        results = self._on_host
        packed = [] if results.round is None else results.round.read()
        lines = lines_of(packed, results.depth)
        first_tokens = () if results.first_tokens is None else tuple(results.first_tokens.tolist())
        return StepResult(
            first_token_ids=first_tokens,
            emitted=tuple(tuple(line[1 : 1 + line[0]]) for line in lines),
            first_logprobs=_unpacked(results.first_logprobs, [1] * len(first_tokens)),
            emitted_logprobs=_unpacked(results.emitted_logprobs, [line[0] for line in lines]),
            prompt_logprobs=tuple(
                None if scored is None else unpack(scored[1].tolist(), scored[0])
                for scored in results.prompt_logprobs or ()
            ),
            faults=results.faults,
            seconds=_seconds(packed, results.prefill_stamps),
            num_graph_replays=int(results.is_replayed),
        )


def _seconds(packed: list[int], prefill_stamps: torch.Tensor | None) -> StageSeconds:
    draft, target, mask, bookkeeping = _differences(packed[:NUM_STAMPS] or [0] * NUM_STAMPS)
    (prefill,) = _differences([0, 0] if prefill_stamps is None else prefill_stamps.tolist())
    return StageSeconds(draft=draft, target=target, mask=mask, bookkeeping=bookkeeping, prefill=prefill)


def _to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to("cpu", non_blocking=True)


def _scores_to_host(scores: tuple[Wanted, torch.Tensor] | None) -> tuple[Wanted, torch.Tensor] | None:
    return None if scores is None else (scores[0], scores[1].to("cpu", non_blocking=True))


def _differences(times: list[int]) -> list[float]:
    """Returns the seconds between times in nanoseconds."""
    return [(after - before) / 1e9 for before, after in pairwise(times)]


def _unpacked(scores: Scores | None, counts: list[int]) -> tuple[TokenLogprobs | None, ...]:
    """Returns the scores of the first counts[line] tokens of each line, None where none were wanted."""
    if scores is None:
        return ()
    wanted, packed = scores
    places = {line: place for place, line in enumerate(wanted)}
    return tuple(
        unpack(packed[places[line], :count].tolist(), wanted[line]) if line in wanted else None
        for line, count in enumerate(counts)
    )
