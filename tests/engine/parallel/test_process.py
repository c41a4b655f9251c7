"""Ranks as processes of a real engine: one that ends, ends all others, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from headway_testing.checkpoints import random_mimo
from headway_testing.engine_peer import Peer, is_running

from headway.engine import (
    Configure,
    EngineConfig,
    Failure,
    ModelError,
    Ready,
    RoundOutput,
    SamplingParams,
    Shutdown,
    Submit,
)
from headway.engine.parallel.ranks import Ranks

SECONDS, MOST_SECONDS = 60.0, 20.0


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Of a model with a context that a request can generate for a while in."""
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 152,
        "max_position_embeddings": 8192,
    }
    folder = random_mimo(tmp_path / "model", **sizes)
    return EngineConfig(model_path=str(folder), threads=1, device="cpu", tensor_parallel_size=2)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[Peer, str]]:
    address = f"ipc://{tmp_path}/socket"
    with closing(Peer(address)) as peer:
        yield peer, address


def started(end: Peer, address: str, config: EngineConfig) -> tuple[subprocess.Popen[bytes], int]:
    """Returns an engine that serves, and the process of its other rank."""
    engine = subprocess.Popen([sys.executable, "-P", "-m", "headway.engine.process", address])
    end.send(Configure(config))
    assert end.wait_for(Ready).info.num_ranks == 2
    (rank,) = map(int, Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split())
    return engine, rank


def keep_busy(end: Peer) -> None:
    sampling = SamplingParams(temperature=0.0)
    end.send(Submit(request_id=1, prompt_token_ids=[1, 2, 3], sampling=sampling, max_tokens=8000))
    end.wait_for(RoundOutput)


def assert_left(rank: int, since: float) -> None:
    while is_running(rank):
        assert time.monotonic() - since < MOST_SECONDS, "a rank outlived the engine"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_rank_that_dies_ends_the_engine(
    peer: tuple[Peer, str], config: EngineConfig, *, is_busy: bool
) -> None:
    end, address = peer
    engine, rank = started(end, address, config)
    with engine:
        if is_busy:
            keep_busy(end)
        os.kill(rank, signal.SIGKILL)
        since = time.monotonic()
        failure = end.wait_for(Failure)
        assert engine.wait(SECONDS) == 1
        assert time.monotonic() - since < MOST_SECONDS
    assert failure.kind == "crash"
    assert "rank" in failure.message
    assert not is_running(rank)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_rank_leaves_with_the_engine(
    peer: tuple[Peer, str], config: EngineConfig, *, is_busy: bool
) -> None:
    end, address = peer
    engine, rank = started(end, address, config)
    with engine:
        if is_busy:
            keep_busy(end)
        engine.kill()
        assert_left(rank, time.monotonic())


@pytest.mark.gpu
@pytest.mark.parametrize("is_engine", [True, False], ids=["engine", "rank"])
def test_ranks_that_wait_for_each_other_on_gpus_end_together(
    peer: tuple[Peer, str], config: EngineConfig, monkeypatch: pytest.MonkeyPatch, *, is_engine: bool
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    end, address = peer
    fields = {
        "device": "cuda",
        "threads": None,
        "max_running": 2,
        "depth": 0,
        "kv_cache_memory_bytes": 32 << 20,
    }
    on_gpu = msgspec.structs.replace(config, **fields)
    engine, rank = started(end, address, on_gpu)
    with engine:
        keep_busy(end)
        os.kill(engine.pid if is_engine else rank, signal.SIGKILL)
        since = time.monotonic()
        assert engine.wait(SECONDS) != 0
        assert_left(rank, since)


@pytest.mark.slow
def test_a_shutdown_ends_all_ranks(peer: tuple[Peer, str], config: EngineConfig) -> None:
    end, address = peer
    engine, rank = started(end, address, config)
    with engine:
        end.send(Shutdown())
        assert engine.wait(SECONDS) == 0
    assert not is_running(rank)


@pytest.mark.slow
def test_a_rank_that_dies_while_the_others_connect_ends_the_start(
    peer: tuple[Peer, str], config: EngineConfig
) -> None:
    """It has said that it has loaded, so that the first waits for it in a place where nothing tells."""
    end, address = peer
    code = "import os, sys, headway.engine.rank as rank; rank.build_rank = lambda *_: os._exit(1); rank.main(int(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", code]
    starter = (
        "import os, sys, headway.engine.parallel.ranks as ranks, headway.engine.process as process; "
        f"ranks._COMMAND = {command!r}; os._exit(process.main({address!r}, os.getppid()))"
    )
    engine = subprocess.Popen([sys.executable, "-P", "-c", starter])
    with engine:
        end.send(Configure(config))
        assert engine.wait(SECONDS) == 1


def test_a_rank_that_cannot_load_its_share_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = EngineConfig(model_path=str(tmp_path / "nothing"), device="cpu", tensor_parallel_size=2)
    ranks = Ranks(config, available=1 << 30)
    try:
        with pytest.raises(ModelError, match=r"rank 1: .*nothing"):
            ranks.wait_until_loaded()
    finally:
        ranks.close()
    assert not list(tmp_path.iterdir())
