"""The fleet as an application of Ray Serve: an ingress on CPUs, and replicas with GPUs.

A configuration of Ray Serve names it by `import_path: headway.server.fleet.application:build`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headway.server.fleet.ingress import Proxy, Replicas
from headway.server.fleet.messages import ReplicaError
from headway.server.fleet.metrics import fleet_text
from headway.server.fleet.replica import Replica
from headway.server.fleet.routing import FleetRouter
from headway.server.fleet.settings import FleetSettings, read_settings

REPLICA = "Replica"
# Ray's own limit must not apply: `headway serve` has its own, which it reports by status 429.
MAX_ONGOING = 10_000
SHUTDOWN_SECONDS = 30.0  # of a replica, in addition to its time to drain
SCRAPE_SECONDS = 8.0
BROKEN = (RayError, RayServeException, ReplicaError)
QUIET = {"enable_access_log": False}  # each replica's server has its own


def build(args: dict[str, Any]) -> Application:
    """Returns the application described by `args`. Raises ConfigError."""
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
        name = serve.get_replica_context().app_name
        handle = serve.get_deployment_handle(REPLICA, name)
        forward = handle.options(stream=True).forward.remote

        async def metrics(_: Request) -> Response:
            texts, states = await asyncio.gather(_texts(handle), asyncio.to_thread(_states, name))
            text = await asyncio.to_thread(fleet_text, texts, states)
            return Response(text, media_type=CONTENT_TYPE_LATEST)

        everything = Proxy(Replicas(forward, BROKEN, settings.max_body_bytes))
        return Starlette(routes=[Route("/metrics", metrics), Route("/{path:path}", everything)])

    ingress = serve.deployment(
        serve.ingress(proxy)(),
        name="Ingress",
        num_replicas=settings.ingresses,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=settings.drain_seconds + SHUTDOWN_SECONDS,
        logging_config=QUIET,
    )
    bound: Application = ingress.bind(
        replicas.bind(settings.model, settings.flags, settings.drain_seconds, _replica_name)
    )
    return bound


def _replica_name() -> str:
    """Runs in each replica."""
    name: str = serve.get_replica_context().replica_id.unique_id
    return name


async def _texts(handle: DeploymentHandle) -> dict[str, bytes]:
    """Returns the metrics of each replica that answers."""
    try:
        called = handle.broadcast("metrics")
        found = await called.results_async(timeout_s=SCRAPE_SECONDS, return_exceptions=True)
    except (TimeoutError, *BROKEN):
        return {}
    return dict(one for one in found if not isinstance(one, BaseException))


def _states(name: str) -> Mapping[str, int]:
    """Returns the number of replicas in each state."""
    application = serve.status().applications.get(name)
    deployment = application.deployments.get(REPLICA) if application else None
    return dict(deployment.replica_states) if deployment else {}
