"""The variables of the environment: those of Kubernetes are not the operator's, and misspelt ones are
named."""

from __future__ import annotations

import logging

import pytest

from headway.engine import EngineConfig
from headway.server import cli
from headway.server.base.config import ModelSource, ServerConfig

Served = tuple[ServerConfig, ModelSource, EngineConfig]
SECRET = "correct-horse"
OF_A_SERVICE = {
    "HEADWAY_SERVICE_HOST": "10.96.7.7", "HEADWAY_SERVICE_PORT": "80", "HEADWAY_SERVICE_PORT_HTTP": "80",
    "HEADWAY_PORT": "tcp://10.96.7.7:80", "HEADWAY_PORT_80_TCP": "tcp://10.96.7.7:80", "HEADWAY_PORT_80_TCP_PROTO": "tcp",
    "HEADWAY_PORT_80_TCP_PORT": "80", "HEADWAY_PORT_80_TCP_ADDR": "10.96.7.7",
}  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        OF_A_SERVICE,
        {"HEADWAY_PORT": "tcp://[fd00:10:96::7]:80"},
        {"HEADWAY_PORT": "udp://10.96.7.7:53"},
        {name.replace("HEADWAY_", "HEADWAY_API_"): value for name, value in OF_A_SERVICE.items()},
    ],
    ids=["all", "ipv6", "udp", "service-headway-api"],
)
@pytest.mark.parametrize(("flags", "port"), [([], 8000), (["--port", "7"], 7)], ids=["default", "flag"])
def test_what_kubernetes_sets_for_a_service_is_ignored_and_told_once(
    served: list[Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    variables: dict[str, str], flags: list[str], port: int,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "headway.server"):
        assert cli.main(["serve", *flags]) == 0
    assert [config.port for config, *_ in served] == [port]
    (line,) = caplog.messages
    assert line.startswith(f"{', '.join(sorted(variables))}: ignored")
    assert "Kubernetes" in line
    assert "enableServiceLinks: false" in line


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("HEADWAY_DEPHT", "did you mean HEADWAY_DEPTH?"),
        ("HEADWAY_APIKEY", "did you mean HEADWAY_API_KEY?"),
        ("HEADWAY_SERVED_MODEL_NAMES", "did you mean HEADWAY_SERVED_MODEL_NAME?"),
        ("HEADWAY_TP", "use HEADWAY_TENSOR_PARALLEL_SIZE"),
        ("HEADWAY_MAX_NUM_SEQS", "use HEADWAY_MAX_RUNNING"),
        ("HEADWAY_COLOUR", "`headway serve --help-all` names all in brackets"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_one_and_without_its_value(
    served: list[Served],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    hint: str,
) -> None:
    monkeypatch.setenv(variable, SECRET)
    monkeypatch.setenv("HEADWAY_URL", "http://localhost:8000")  # of `headway chat`
    assert cli.main(["serve"]) == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == f"{variable} is ignored: there is no such variable; {hint}"
    assert len(served) == 1


@pytest.mark.parametrize("command", ["serve", "warmup", "inspect"])
@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("HEADWAY_DOWNLOAD_DIR", "HEADWAY_DOWNLOAD_DIR was removed: use the variable HF_HUB_CACHE"),
        ("HEADWAY_MAX_WAITING_TOKENS", "HEADWAY_MAX_WAITING_TOKENS was removed: use --max-waiting, a number of requests"),
    ],
)  # fmt: skip
def test_the_variable_of_a_removed_flag_is_refused_as_the_flag_is(
    served: list[Served], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, variable: str, told: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, SECRET)
    with pytest.raises(SystemExit) as left:
        cli.main([command])
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert told in error
    assert SECRET not in error
    assert not served
