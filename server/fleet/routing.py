"""The router of a fleet, as Ray Serve calls it: in the handle by which an ingress reaches the replicas.

It counts by what Ray has heard of each replica's queue, at most 10 s ago; of one that it has heard nothing of
it is assumed that it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headway.server.fleet.messages import ForwardedRequest
from headway.server.fleet.ring import least_loaded, preferred
from headway.server.fleet.settings import Routing

Loads = Mapping[str, int]


class FleetRouter(RequestRouter):
    """Mutable as its base; it keeps nothing of a request, only whose turn it is."""

    def initialize_state(self, routing: Routing = "prefix") -> None:
        self._choose: Callable[[bytes, Loads], Sequence[str]] = {
            "prefix": _by_prefix,
            "least-loaded": _by_load,
            "round-robin": self._in_turn,
        }[routing]
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the chosen ones, and after them all: a full one takes nothing."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        request = pending_request.args[0]
        assert isinstance(request, ForwardedRequest)
        chosen = self._choose(request.key, loads)
        return [[by_name[name] for name in chosen], candidate_replicas]

    def _in_turn(self, key: bytes, loads: Loads) -> Sequence[str]:
        self._turn += 1
        return [sorted(loads)[self._turn % len(loads)]]


def _by_load(key: bytes, loads: Loads) -> Sequence[str]:
    return least_loaded(loads)


def _by_prefix(key: bytes, loads: Loads) -> Sequence[str]:
    owner = preferred(key, loads) if key else None
    return least_loaded(loads) if owner is None else [owner]
