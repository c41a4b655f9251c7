"""The router of a fleet, which Ray Serve calls in the handle by which an ingress reaches the replicas.

It counts the requests by Ray's latest information on each replica's queue, which is at most 10 s old; a
replica without any counts as idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headway.server.fleet.messages import ForwardedRequest
from headway.server.fleet.ring import least_loaded, preferred
from headway.server.fleet.settings import Routing

Loads = Mapping[str, int]
Choice = tuple[str, Sequence[str]]  # the reason, one of REASONS, and replicas


class FleetRouter(RequestRouter):
    """Mutable as its base; of the requests it remembers only whose turn it is."""

    def initialize_state(self, routing: Routing = "prefix") -> None:
        self._choose: Callable[[bytes, Loads], Choice] = {
            "prefix": _by_prefix,
            "least-loaded": _by_load,
            "round-robin": self._in_turn,
        }[routing]
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the chosen replicas, and after them all, since a full one accepts nothing. Notes the
        reason in the request."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        request = pending_request.args[0]
        assert isinstance(request, ForwardedRequest)
        reason, chosen = self._choose(request.key, loads)
        pending_request.args[0] = replace(request, reason=reason)
        return [[by_name[name] for name in chosen], candidate_replicas]

    def _in_turn(self, key: bytes, loads: Loads) -> Choice:
        self._turn += 1
        return "round-robin", [sorted(loads)[self._turn % len(loads)]]


def _by_load(key: bytes, loads: Loads) -> Choice:
    return "least-loaded", least_loaded(loads)


def _by_prefix(key: bytes, loads: Loads) -> Choice:
    if not key:
        return "no-prefix", least_loaded(loads)
    owner = preferred(key, loads)
    return ("spilled", least_loaded(loads)) if owner is None else ("prefix", [owner])
