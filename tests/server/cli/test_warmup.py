"""`headway warmup`: its options, its end, and what it says where there is no GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
from headway_testing.fake_engine import FakeEngine

from headway.engine import ConfigError, EngineConfig, EngineInfo
from headway.server import cli
from headway.server.base.config import ModelSource
from headway.server.cli.warmup import warm_up


class StartingEngine(FakeEngine):
    """Mutable: notes what is asked of it, in order."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    async def wait_until_ready(self) -> EngineInfo:
        self.calls.append("wait")
        if self.error is not None:
            raise self.error
        assert self.info is not None
        return self.info

    async def close(self) -> None:
        self.calls.append("close")


def put_in_place(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What the engine is started with."""
    configs: list[EngineConfig] = []
    module = import_module("headway.server.cli.warmup")
    monkeypatch.setattr(module, "EngineClient", lambda config: configs.append(config) or engine)
    return configs


def test_it_takes_the_options_of_serve_and_ends_when_the_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = StartingEngine()
    configs = put_in_place(engine, monkeypatch)
    assert cli.main(["warmup", "--port", "9", "--max-running", "7", "--depth", "2"]) == 0
    (config,) = configs
    assert (config.device, config.max_running, config.depth) == ("cuda", 7, 2)
    assert engine.calls == ["start", "wait", "close"]
    assert "kernels for FakeForCausalLM on cpu are compiled" in capsys.readouterr().out


def test_a_start_that_fails_is_told_as_serve_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = StartingEngine(ConfigError("--max-running is 7, it must be 6 or less"))
    put_in_place(engine, monkeypatch)
    assert cli.main(["warmup", "--max-running", "7"]) == 1
    assert engine.calls == ["start", "wait", "close"]
    assert "headway: --max-running is 7" in capsys.readouterr().err


def test_without_a_gpu_it_says_that_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["warmup"]) == 1
    error = capsys.readouterr().err
    assert "headway: warmup needs a GPU of the kind that will serve" in error
    assert "Traceback" not in error


def test_it_does_not_warm_a_cpu() -> None:
    with pytest.raises(ConfigError, match="the CPU needs no compiled kernels"):
        warm_up(ModelSource(), EngineConfig(model_path="", device="cpu"))
