"""The example for the Gateway API inference extension agrees with the pods and with what /metrics shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headway.engine import EngineStats
from headway.server.telemetry.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
TEXT = (FOLDER / "inference-gateway.yaml").read_text()
OBJECTS: dict[str, dict[str, Any]] = {entry["kind"]: entry for entry in yaml.safe_load_all(TEXT)}
PICKER = yaml.safe_load(OBJECTS["ConfigMap"]["data"]["picker.yaml"])
# What the extension's model server protocol asks for: the field, the flag of older pickers, vLLM's name.
CONTRACT = [
    ("queuedRequestsSpec", "--total-queued-requests-metric", "vllm:num_requests_waiting"),
    ("runningRequestsSpec", "--total-running-requests-metric", "vllm:num_requests_running"),
    ("kvUsageSpec", "--kv-cache-usage-percentage-metric", "vllm:kv_cache_usage_perc"),
    ("cacheInfoSpec", "--cache-info-metric", "vllm:cache_config_info"),
]


def engine_config() -> dict[str, str]:
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in PICKER["plugins"]}
    parameters = plugins["core-metrics-extractor"]
    (engine,) = parameters["engineConfigs"]
    assert engine["name"] == parameters["defaultEngine"]
    assert isinstance(engine, dict)
    return engine


@pytest.mark.parametrize(("field", "flag", "vllm_name"), CONTRACT)
def test_the_picker_reads_gauges_that_metrics_shows(field: str, flag: str, vllm_name: str) -> None:
    """By Headway's name in the file and in the flags, and by vLLM's with its names: the same gauge."""
    stats = EngineStats(
        num_kv_blocks=8,
        num_kv_blocks_used=2,
        kv_block_size=16,
        num_requests_waiting=3,
        num_requests_running=5,
    )
    text = Metrics(lambda: stats, lambda: 0, model_name="tiny", names="both").text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    name = engine_config()[field]
    assert re.findall(rf"{flag} (\S+)", TEXT) == [name]
    (own,), (vllm,) = families[name].samples, families[vllm_name].samples
    assert families[name].type == families[vllm_name].type == "gauge"
    assert own.value == vllm.value > 0
    sizes = {"block_size": "16", "num_gpu_blocks": "8"} if field == "cacheInfoSpec" else {}
    for sample in (own, vllm):
        assert sizes.items() <= sample.labels.items()


def test_the_picker_asks_for_no_metric_that_headway_lacks() -> None:
    assert engine_config().keys() == {"name", "loraSpec", *(field for field, _, _ in CONTRACT)}
    assert engine_config()["loraSpec"] == ""


def test_every_scorer_is_a_plugin() -> None:
    (profile,) = PICKER["schedulingProfiles"]
    scorers = {entry["pluginRef"] for entry in profile["plugins"]}
    assert scorers <= {plugin["type"] for plugin in PICKER["plugins"]}


def test_the_pool_selects_the_pods_of_the_deployment_and_the_route_leads_to_it() -> None:
    deployment = yaml.safe_load((FOLDER / "base/deployment.yaml").read_text())
    template = deployment["spec"]["template"]
    pool, route = OBJECTS["InferencePool"], OBJECTS["HTTPRoute"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = [port["containerPort"] for port in container["ports"]]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == ports
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert OBJECTS["ConfigMap"]["metadata"]["name"] == pool["spec"]["endpointPickerRef"]["name"]
