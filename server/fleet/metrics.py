"""The fleet's /metrics: the metrics of each replica's server with a label for the replica, and the fleet's
own families. This module knows no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headway.server.fleet.messages import REASONS

REPLICA = "replica"  # the label
STATES, ROUTED = "headway_fleet_replicas", "headway_fleet_requests_routed_total"
CONTINUED = "headway_fleet_streams_continued_total"


class RoutedMetrics:
    """Counts the requests of one replica. Mutable: its replica is the only writer."""

    def __init__(self) -> None:
        self._routed = dict.fromkeys(REASONS, 0)
        self._num_continued = 0

    def count(self, reason: str, *, is_continued: bool) -> None:
        """reason: one of REASONS."""
        self._routed[reason] += 1
        self._num_continued += is_continued

    def text(self) -> bytes:
        described = "Requests that the router sent to this replica, by its reason."
        routed = CounterMetricFamily(ROUTED, described, labels=["reason"])
        for reason, count in self._routed.items():
            routed.add_metric([reason], count)
        described = "Streams that went on in this replica after another one had ended."
        return _text([routed, CounterMetricFamily(CONTINUED, described, self._num_continued)])


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _text(families: Iterable[Metric]) -> bytes:
    return generate_latest(_Collected(families))


def fleet_text(texts: Mapping[str, bytes], states: Mapping[str, int]) -> bytes:
    """Returns the metrics of the whole fleet in Prometheus' text format.

    texts: those of the replicas by name. states: the number of replicas in each of Ray's states.
    """
    return _text([_states(states), *_labelled(texts)])


def _states(states: Mapping[str, int]) -> Metric:
    """Returns the family of replicas by state. Ray names only the states of some replica; running is
    always shown."""
    described = "Replicas by their state, as Ray Serve has it: starting, running, stopping and others."
    family = GaugeMetricFamily(STATES, described, labels=["state"])
    for state, count in sorted(({"RUNNING": 0} | dict(states)).items()):
        family.add_metric([state.lower()], count)
    return family


def _labelled(texts: Mapping[str, bytes]) -> Iterator[Metric]:
    found: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            joined = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            joined.samples += [s._replace(labels=s.labels | {REPLICA: name}) for s in family.samples]
    yield from found.values()
