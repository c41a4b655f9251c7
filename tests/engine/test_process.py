"""The engine as a process of its own: its first frame, its failures, and when it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from headway_testing.checkpoints import random_mimo
from headway_testing.engine_peer import SECONDS, Peer, is_running

from headway.engine import (
    Configure,
    EngineConfig,
    Failure,
    Ready,
    RoundOutput,
    SamplingParams,
    Shutdown,
    Submit,
)
from headway.engine.protocol.messages import Heartbeat, Mailbox


def command(address: str) -> list[str]:
    return [sys.executable, "-P", "-m", "headway.engine.process", address]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[Peer, str]]:
    address = f"ipc://{tmp_path}/socket"
    with closing(Peer(address)) as peer:
        yield peer, address


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(model_path=str(random_mimo(tmp_path / "model")), threads=1, device="cpu")


def test_it_serves_until_a_shutdown_and_ignores_sigterm(peer: tuple[Peer, str], config: EngineConfig) -> None:
    """A service manager signals the whole group; the API process decides when the engine may go."""
    end, address = peer
    with subprocess.Popen(command(address)) as engine:
        end.send(Configure(config))
        assert end.wait_for(Ready).info.depth == 3
        engine.send_signal(signal.SIGTERM)
        end.send(Submit(request_id=5, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), max_tokens=4))
        tokens: list[int] = []
        while len(tokens) < 4:
            (event,) = end.wait_for(RoundOutput).events
            assert event.request_id == 5
            tokens += event.token_ids
        end.send(Shutdown())
        assert engine.wait(SECONDS) == 0


def test_it_leaves_at_once_where_its_parent_ended_while_it_began(peer: tuple[Peer, str]) -> None:
    """Whoever has adopted it meanwhile is not asked."""
    _end, address = peer
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    environment = os.environ | {"HEADWAY_ENGINE_PARENT": str(ended.pid)}
    with subprocess.Popen(command(address), env=environment) as engine:
        assert engine.wait(SECONDS) == 1


@pytest.mark.slow
def test_it_tells_why_it_cannot_start(peer: tuple[Peer, str], tmp_path: Path) -> None:
    end, address = peer
    with subprocess.Popen(command(address)) as engine:
        end.send(Configure(EngineConfig(model_path=str(tmp_path / "nothing"))))
        failure = end.wait_for(Failure)
        assert engine.wait(SECONDS) == 1
    assert failure.kind == "ModelError"
    assert "nothing" in failure.message


@pytest.mark.slow
def test_it_leaves_when_its_parent_is_gone(peer: tuple[Peer, str], config: EngineConfig) -> None:
    end, address = peer
    code = f"import subprocess, time; print(subprocess.Popen({command(address)!r}).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        end.send(Configure(config))
        end.wait_for(Ready)
        parent.kill()
    deadline = time.monotonic() + SECONDS
    while is_running(engine_pid):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.05)


def test_sending_does_not_wait_for_a_peer_that_is_gone(peer: tuple[Peer, str]) -> None:
    """A large model's start sends some thousand signs of life before it looks whether its parent is there."""
    end, address = peer
    mailbox = Mailbox(address)
    mailbox.send(Heartbeat("load", 0.0))
    end.wait_for(Heartbeat)
    end.close()
    sender = threading.Thread(
        target=lambda: [mailbox.send(Heartbeat("load", 0.5)) for _ in range(3000)], daemon=True
    )
    sender.start()
    sender.join(SECONDS)
    assert not sender.is_alive()
    mailbox.close()
