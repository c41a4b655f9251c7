"""The configuration of a fleet: the files of deploy/ray, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.engine import ConfigError
from headway.server.fleet.scaling import by_requests_and_kv_cache
from headway.server.fleet.settings import FleetSettings, read_settings

DEPLOY = Path(__file__).resolve().parents[3] / "deploy/ray"


def test_defaults() -> None:
    wanted = FleetSettings(None, 2, 1, "prefix", {}, 8 * 2**20, 30.0)
    assert read_settings({}) == wanted


def test_flags_are_texts_as_headway_serve_reads_them() -> None:
    serve = {
        "max_running": 64, "max-body": "1MiB", "drain-seconds": 5, "no-prefix-caching": True,
        "served-model-name": ["a", "b"], "require-speculation": False, "top": None,
    }  # fmt: skip
    del serve["top"]
    settings = read_settings({"serve": serve})
    assert settings.flags == {
        "max-running": "64", "max-body": "1MiB", "drain-seconds": "5", "no-prefix-caching": "true",
        "served-model-name": ["a", "b"], "require-speculation": "false",
    }  # fmt: skip
    assert (settings.max_body_bytes, settings.drain_seconds) == (2**20, 5.0)


@pytest.mark.parametrize(("replicas", "ingresses"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_two_replicas_share_an_ingress(replicas: int, ingresses: int) -> None:
    assert read_settings({"replicas": replicas}).ingresses == ingresses


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 0}, "replicas is 0, it must be 1 or more"),
    ({"replicas": "two"}, r"Expected `int`, got `str` - at `\$.replicas`"),
    ({"gpus": 0.5}, "gpus is 0.5, it must be a whole number"),
    ({"gpus": -1}, "gpus is -1"),
    ({"routing": "random"}, r"Invalid enum value 'random' - at `\$.routing`"),
    ({"modell": "x"}, "unknown field `modell`; it must have only model, replicas, gpus, routing and serve"),
    ({"serve": {"max-runing": 3}}, "serve: max-runing is not a flag of headway serve"),
    ({"serve": {"max-running": "many"}}, "serve: max-running is 'many', it must be a whole number"),
    ({"serve": {"max-running": ["3"]}}, "serve: max-running is a list, it must be one value"),
    ({"serve": {"port": 9000}}, "serve: port is no flag of a replica; see http_options of Ray Serve"),
    ({"serve": {"config": "a.yaml"}}, "serve: config is no flag of a replica"),
    ({"serve": {"api-key": ""}}, "serve: api-key is '', it must be 1 character or more"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_is_wrong_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(args)


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings({"serve": {"api-key": "sec ret"}})
    assert "sec" not in str(raised.value).replace("seconds", "")


def test_the_files_of_deploy_describe_one_fleet() -> None:
    plain = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == plain
    (application,) = plain["applications"]
    module, _, function = application["import_path"].partition(":")
    assert module == "headway.server.fleet.application"
    source = Path(__file__).resolve().parents[3] / "server/fleet/application.py"
    assert f"\ndef {function}(args" in source.read_text()
    settings = read_settings(application["args"])
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    policy = f"{by_requests_and_kv_cache.__module__}:{by_requests_and_kv_cache.__name__}"
    ingress, replica = application["deployments"]
    scaling = replica["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (
        workers["minReplicas"],
        workers["maxReplicas"],
    )
    assert 2 * ingress["num_replicas"] >= scaling["max_replicas"]
    assert scaling["policy"]["policy_function"] == policy
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    template = workers["template"]["spec"]
    limits = template["containers"][0]["resources"]["limits"]
    assert workers["replicas"] * int(limits["nvidia.com/gpu"]) == settings.replicas * settings.gpus
    assert template["terminationGracePeriodSeconds"] > settings.drain_seconds
