"""What is deployed is valid by its own tools, and agrees with itself and with the server."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from headway_testing.tools import installed

from headway.server import cli
from headway.server.base.config import ServerConfig

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs/runbook.md"
DEPLOY = ROOT / "deploy"
KUSTOMIZATIONS = ["base", "overlays/cpu", "overlays/two-gpus"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OPTION_OF = {
    option.variable: option for groups in cli.ALL_GROUPS for group in groups.values() for option in group
}
Object = dict[str, Any]


def tool(name: str, *arguments: str | Path) -> str:
    """Output of a tool that must succeed. Tools are those of the virtual environment, then the system's."""
    own = Path(sys.executable).parent / name
    done = subprocess.run(
        [own if own.exists() else installed(name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def objects(folder: str) -> dict[str, Object]:
    """{kind: object} of what kustomize makes of the folder."""
    made = list(yaml.safe_load_all(tool("kubectl", "kustomize", DEPLOY / "kubernetes" / folder)))
    assert len({entry["kind"] for entry in made}) == len(made)
    return {entry["kind"]: entry for entry in made}


def grace_seconds(text: str) -> int:
    return int(text.removesuffix("s"))


# --- settings ------------------------------------------------------------------------------------------


def set_by_environment() -> dict[str, dict[str, str]]:
    """{file: {variable: value}} of what is set before a user sets anything."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["headway"]
    in_compose = {name: value for name, value in service["environment"].items() if value is not None}
    unit = (DEPLOY / "systemd/headway.service").read_text()
    in_unit = " ".join(re.findall(r"^Environment=(.+)$", unit, re.MULTILINE))
    (in_image,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    in_pods = {
        f"kubernetes/{folder}": {
            **made["ConfigMap"]["data"],
            **{entry["name"]: entry["value"] for entry in container_of(made).get("env", [])},
        }
        for folder, made in ((folder, objects(folder)) for folder in KUSTOMIZATIONS)
    }
    return {
        "compose.yaml": {
            name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in in_compose.items()
        },
        "headway.service": dict(entry.split("=", 1) for entry in in_unit.split()),
        "Dockerfile": dict(entry.split("=", 1) for entry in in_image.replace("\\\n", " ").split()),
        **in_pods,
    }


def command_lines() -> dict[str, list[str]]:
    """{file: arguments of headway}."""
    unit = (DEPLOY / "systemd/headway.service").read_text()
    (in_image,) = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["headway"]
    return {
        "compose.yaml": service.get("command", ["serve"]),
        "headway.service": re.findall(r"^ExecStart=\S+ (.+)$", unit, re.MULTILINE)[0].split(),
        "Dockerfile": yaml.safe_load(in_image),
        **{f"kubernetes/{folder}": container_of(objects(folder))["args"] for folder in KUSTOMIZATIONS},
    }


def container_of(made: dict[str, Object]) -> Object:
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def test_what_is_deployed_leaves_the_defaults_as_they_are() -> None:
    """An address that others reach and logs for machines are meant; the port is told because another could be
    in the environment."""
    meant = {
        "HEADWAY_HOST": "0.0.0.0",
        "HEADWAY_PORT": "8000",
        "HEADWAY_LOG_FORMAT": "json",
        "HEADWAY_MODEL": "",
    }
    others = {
        file: {
            name: text
            for name, text in variables.items()
            if name.startswith("HEADWAY_") and meant.get(name) != text
        }
        for file, variables in set_by_environment().items()
    }
    assert others.pop("kubernetes/overlays/two-gpus") == {"HEADWAY_TENSOR_PARALLEL_SIZE": "2"}
    assert not any(others.values()), others
    for file, arguments in command_lines().items():
        told = vars(cli._parser().parse_args(arguments))
        given = {name: value for name, value in told.items() if value is not None}
        assert given.pop("command") == "serve"
        assert given == ({"port": "8000"} if file.startswith("kubernetes") else {})


def test_every_variable_and_flag_that_is_spoken_of_exists() -> None:
    files = [file for file in DEPLOY.rglob("*") if file.suffix in (".yaml", ".service", ".yml")]
    text = "\n".join(file.read_text() for file in (*files, RUNBOOK)) + DOCKERFILE
    assert set(re.findall(r"HEADWAY_[A-Z_]+", text)) <= OPTION_OF.keys() | {"HEADWAY_MODEL"}
    flags = set(re.findall(r"`(--[a-z-]+)", text))
    assert len(flags) > 10
    assert flags <= {f"--{option.flag}" for option in OPTION_OF.values()}


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_a_pod_listens_at_its_port_whatever_the_services_beside_it_are_called(folder: str) -> None:
    made = objects(folder)
    (port,) = container_of(made)["ports"]
    arguments = container_of(made)["args"]
    assert arguments[arguments.index("--port") + 1] == str(port["containerPort"])
    assert made["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    assert f"HEADWAY_PORT={port['containerPort']}" in DOCKERFILE


# --- the image -----------------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say() -> None:
    assert tool("hadolint", ROOT / "Dockerfile") == ""


def test_the_image_copies_every_package_and_nothing_that_is_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name.rstrip("/") for line in copied for name in line.split()}
    assert names == kept
    assert {"server", "engine", "kernels", "src"} <= names


# --- Kubernetes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_kubernetes_accepts_the_manifests(folder: str, tmp_path: Path) -> None:
    made = objects(folder)
    del made["PodMonitor"]  # of an operator: Kubernetes has no schema for it
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(made.values()))
    told = tool("kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert told.count(" passed ") == len(made) == 5


def test_kubernetes_refuses_a_misspelt_field(tmp_path: Path) -> None:
    wrong = objects("base")["Deployment"]
    wrong["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 60
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(AssertionError, match="terminationGracePeriodSecond"):
        tool("kubernetes-validate", "--strict", tmp_path / "wrong.yaml")


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_names_labels_and_ports_of_the_objects_agree(folder: str) -> None:
    made = objects(folder)
    template = made["Deployment"]["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    for selector in (
        made["Deployment"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness", "startup")]
    (service_port,), (scraped,) = (
        made["Service"]["spec"]["ports"],
        made["PodMonitor"]["spec"]["podMetricsEndpoints"],
    )
    assert {probe["port"] for probe in probes} | {service_port["targetPort"], scraped["port"]} <= ports
    assert [probe["path"] for probe in probes] == ["/health", "/ready", "/health"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    claim = made["PersistentVolumeClaim"]["metadata"]["name"]
    assert claim in [
        v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
    ]
    assert container["envFrom"][0]["configMapRef"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert (
        made["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == made["Deployment"]["metadata"]["name"]
    )
    assert labels[made["PodMonitor"]["spec"]["jobLabel"]] == "headway"  # the job of the rules


def test_each_rank_has_a_gpu() -> None:
    gpus, ranks = {}, {}
    for folder in KUSTOMIZATIONS:
        container = container_of(objects(folder))
        gpus[folder] = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        variables = {entry["name"]: entry["value"] for entry in container.get("env", [])}
        ranks[folder] = variables.get("HEADWAY_TENSOR_PARALLEL_SIZE", "1")
    assert gpus == ranks | {"overlays/cpu": "0"}
    assert ranks["overlays/two-gpus"] == "2"


def test_the_autoscaler_reads_what_the_adapter_serves() -> None:
    (metric,) = objects("base")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == rule["name"]["matches"]


# --- time to drain -------------------------------------------------------------------------------------


def test_everything_waits_longer_than_the_server_drains() -> None:
    """The server may need five seconds more, to end what was not done in time."""
    least = ServerConfig().drain_seconds + 5
    pod = objects("base")["Deployment"]["spec"]["template"]["spec"]
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    unit = (DEPLOY / "systemd/headway.service").read_text()
    assert pod["terminationGracePeriodSeconds"] > least + pause
    assert grace_seconds(compose["services"]["headway"]["stop_grace_period"]) > least
    assert grace_seconds(re.findall(r"TimeoutStopSec=(\w+)", unit)[0]) > least


# --- compose -------------------------------------------------------------------------------------------


def test_compose_publishes_to_this_machine_only() -> None:
    """Nothing asks for a key unless one is set."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    published = {port for service in services.values() for port in service.get("ports", [])}
    assert len(published) == 3
    assert all(port.startswith(("127.0.0.1:", "${BIND:-127.0.0.1}:")) for port in published), published
    keys = services["headway"]["environment"]
    handed_on = {name for name, value in keys.items() if value is None}
    settings = {"HEADWAY_DEPTH", "HEADWAY_TENSOR_PARALLEL_SIZE"}
    assert handed_on == settings | {"HEADWAY_API_KEY", "HEADWAY_ADMIN_KEY"}


def test_compose_mounts_what_exists_and_scrapes_what_it_runs() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = [v.split(":")[0] for s in services.values() for v in s["volumes"] if v.startswith("./")]
    assert [mount for mount in mounts if not (DEPLOY / mount).exists()] == []
    assert (DEPLOY / services["headway"]["build"]["context"] / "Dockerfile").exists()
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    assert f"EXPOSE {target.split(':')[1]}" in DOCKERFILE
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"].removeprefix("http://").split(":")[0] in services
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/headway.yaml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana/headway.json:{folder}/headway.json:ro" in services["grafana"]["volumes"]


def test_the_gpu_override_reserves_a_device_for_the_server() -> None:
    services = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    (device,) = services["headway"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert device["count"] == "${HEADWAY_TENSOR_PARALLEL_SIZE:-1}"


# --- systemd -------------------------------------------------------------------------------------------


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The command must exist for systemd-analyze: it is replaced by one that does."""
    unit = (DEPLOY / "systemd/headway.service").read_text()
    assert "ExecStart=/opt/headway/bin/headway serve\n" in unit
    verified = tmp_path / "headway.service"
    verified.write_text(unit.replace("/opt/headway/bin/headway", "/bin/true"))
    assert tool("systemd-analyze", "verify", "--man=no", verified) == ""
    verified.write_text(
        unit.replace("KillMode=mixed", "KillMode=mild").replace("/opt/headway/bin/headway", "/bin/true")
    )
    assert "kill mode" in tool("systemd-analyze", "verify", "--man=no", verified)


# --- the dashboard and the runbook ---------------------------------------------------------------------


def test_the_dashboard_is_what_its_builder_makes() -> None:
    built = runpy.run_path(str(DEPLOY / "grafana/build_dashboard.py"))["build"]()
    assert (DEPLOY / "grafana/headway.json").read_text() == built, "run `make docs`"


def test_every_alert_has_its_section_in_the_runbook() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert [alert["alert"] for alert in alerts] == sections
    assert {alert["alert"]: alert["annotations"]["runbook"] for alert in alerts} == {
        name: f"runbook.md#{name.lower()}" for name in sections
    }
