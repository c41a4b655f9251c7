"""The fleet as an application of Ray Serve: an ingress on CPUs and replicas with GPUs.

In a configuration of Ray Serve: `import_path: headway.server.fleet.application:build`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from headway.server.fleet.ingress import Proxy, Replicas
from headway.server.fleet.messages import ReplicaError
from headway.server.fleet.replica import Replica
from headway.server.fleet.routing import FleetRouter
from headway.server.fleet.settings import FleetSettings, read_settings

REPLICA = "Replica"
# Ray's own limits are to be out of the way: `headway serve` has its own, which it tells by status 429.
MAX_ONGOING = 10_000
SHUTDOWN_SECONDS = 30.0  # of a replica, beyond its time to drain
BROKEN = (RayError, RayServeException, ReplicaError)
QUIET = {"enable_access_log": False}  # each replica's server has its own


def build(args: dict[str, Any]) -> Application:
    """Returns the application that `args` describe. Raises ConfigError."""
    return application_of(read_settings(args))


def application_of(settings: FleetSettings) -> Application:
    replicas = serve.deployment(
        Replica,
        name=REPLICA,
        num_replicas=settings.replicas,
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": 1},
        max_ongoing_requests=MAX_ONGOING,
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=settings.drain_seconds + SHUTDOWN_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=FleetRouter, request_router_kwargs={"routing": settings.routing}
        ),
        logging_config=QUIET,
    )

    def proxy() -> ASGIApp:
        """Runs in each ingress."""
        handle = serve.get_deployment_handle(REPLICA, serve.get_replica_context().app_name)
        forward = handle.options(stream=True).forward.remote
        endpoint = Proxy(Replicas(forward, BROKEN, settings.max_body_bytes))
        return Starlette(routes=[Route("/{path:path}", endpoint)])

    ingress = serve.deployment(
        serve.ingress(proxy)(),
        name="Ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=settings.drain_seconds + SHUTDOWN_SECONDS,
        logging_config=QUIET,
    )
    bound: Application = ingress.bind(replicas.bind(settings.model, settings.flags, settings.drain_seconds))
    return bound
