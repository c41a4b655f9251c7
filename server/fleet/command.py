"""`headway fleet`: a fleet on this machine, from its start to its end."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from contextlib import closing, suppress
from dataclasses import replace

import ray
from ray import serve

from headway.engine import ConfigError, HeadwayError, read_model_spec
from headway.server.base.config import ModelSource, ServerConfig
from headway.server.cli import SERVE_GROUPS, options
from headway.server.cli.console import show
from headway.server.cli.hub import model_folder
from headway.server.cli.listening import listen
from headway.server.cli.serve import leaving_on_signals
from headway.server.cli.settings import Settings
from headway.server.fleet.application import REPLICA, SHUTDOWN_SECONDS, application_of
from headway.server.fleet.messages import ReplicaError
from headway.server.fleet.settings import FleetSettings, read_settings

NAME = "headway"
_OPTIONS = {option.flag: option for option in options.FLEET}
OBJECT_STORE_BYTES = 256 * 2**20  # for parts of answers above 100 kB that are in transit
OWN_FLAGS = ("host", "port", "config")


def fleet(settings: Settings, config: ServerConfig, source: ModelSource) -> int:
    """Runs until a signal. Every mistake that can be found before Ray starts is found here."""
    wanted, gpus = _wanted(settings, source), _number(settings, "gpus")
    read_model_spec(model_folder(source))  # downloads the files that all replicas need once
    with closing(listen(config)) as listener:  # reports a port in use at once
        host, port = listener.getsockname()[:2]
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with leaving_on_signals():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, wanted.replicas + wanted.ingresses),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",  # Ray's own ports are not open to other machines
        )
        try:
            with leaving_on_signals():  # Ray has put a handler of its own in place
                _run(replace(wanted, gpus=_gpus_of_each(gpus, wanted)), host, port)
        except SystemExit:  # a signal ends it as it ends `headway serve`
            pass
        finally:
            serve.shutdown()
            ray.shutdown()
    return 0


def _wanted(settings: Settings, source: ModelSource) -> FleetSettings:
    """Raises ConfigError."""
    of_serve = [option for group in SERVE_GROUPS.values() for option in group if option.flag not in OWN_FLAGS]
    given = {option.flag: (option, settings.given(option)) for option in of_serve}
    flags = {
        flag: texts[1] if option.is_list else texts[1][-1]
        for flag, (option, texts) in given.items()
        if texts is not None
    }
    args = {"model": source.name, "replicas": _number(settings, "replicas"), "serve": flags}
    gpus, routing = _number(settings, "gpus") or 0, settings.value(_OPTIONS["routing"])
    return read_settings({**args, "gpus": gpus, "routing": routing})


def _number(settings: Settings, flag: str) -> int | None:
    value = settings.value(_OPTIONS[flag])
    assert value is None or isinstance(value, int)
    return value


def _gpus_of_each(asked: int | None, wanted: FleetSettings) -> int:
    """Returns the GPUs of each replica. Raises ConfigError if this machine has too few."""
    there = int(ray.cluster_resources().get("GPU", 0))
    is_for_cpu = wanted.flags.get("device") == "cpu" or there == 0
    gpus = asked if asked is not None else 0 if is_for_cpu else 1
    if gpus * wanted.replicas > there:
        raise ConfigError(
            f"--replicas is {wanted.replicas} and --gpus is {gpus}, which are {gpus * wanted.replicas} GPUs, and Ray finds {there} "
            "on this machine; --gpus 0 serves on the CPU"
        )
    return gpus


def _why() -> str:
    """Returns what a replica's server said last; empty if it said nothing."""
    application = serve.status().applications.get(NAME)
    told = "" if application is None else application.deployments[REPLICA].message
    found = re.findall(rf"{ReplicaError.__name__}: (.+)", told)
    return found[-1] if found else ""


def _run(wanted: FleetSettings, host: str, port: int) -> None:
    """Raises HeadwayError if the replicas do not start."""
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(application_of(wanted), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise HeadwayError(f"the fleet does not start: {_why() or error}") from None
    where = f"{wanted.gpus} GPU each" if wanted.gpus else "on the CPU"
    show(f"\nHeadway fleet: {wanted.replicas} servers, {where}, at http://{host}:{port}\n")
    try:
        while True:
            signal.pause()
    finally:
        _drain(wanted.drain_seconds + SHUTDOWN_SECONDS)


def _drain(seconds: float) -> None:
    """Lets requests finish in that time. `serve.delete` waits for at most 60 s, `serve.shutdown` for 30."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            serve.delete(NAME)
            return
