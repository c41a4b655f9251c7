"""A checkpoint whose MTP head is wrong: the daemon serves it without drafts and says so, or refuses to start
if that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from headway_testing.broken_heads import broken
from headway_testing.checkpoints import constructed_mimo
from headway_testing.daemon import start_server, stop_server

from headway.engine.bench.shape import made_up_tokenizer

pytestmark = pytest.mark.slow

VOCAB_SIZE = 300
FLAGS = ("--threads", "1", "--depth", "3", "--kv-cache-memory", "16MiB")


def folder_of(tmp_path: Path, kind: str | None) -> str:
    path = constructed_mimo(tmp_path / "right", vocab_size=VOCAB_SIZE)
    path = path if kind is None else broken(path, tmp_path / kind, kind)
    (path / "tokenizer.json").write_text(json.dumps(made_up_tokenizer(VOCAB_SIZE)))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("swapped", "failed"),
        pytest.param(None, "passed", marks=pytest.mark.long),
        pytest.param("missing", "missing", marks=pytest.mark.long),
    ],
)
def test_readiness_gauge_and_speculation_tell_of_the_check(
    kind: str | None, state: str, tmp_path: Path
) -> None:
    server = start_server(folder_of(tmp_path, kind), *FLAGS)
    try:
        ready = httpx.get(f"{server.url}/ready")
        told = httpx.get(f"{server.url}/v1/speculation").json()
        body = {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        metrics = httpx.get(f"{server.url}/metrics").text
    finally:
        assert stop_server(server) == 0
    is_right = state == "passed"
    assert (ready.status_code, ready.json()["is_ready"]) == (200, True)
    assert bool(ready.json()["warnings"]) == (not is_right)
    assert told["check"]["state"] == state
    assert told["max_draft_tokens"] == (3 if is_right else 0)
    assert usage["completion_tokens"] == 20
    assert f'headway_spec_decode_check_state{{state="{state}"}} 1.0' in metrics
    assert is_right or "headway_spec_decode_num_draft_tokens_total 0.0" in metrics


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "reason"), [("swapped", "failed its check"), ("missing", "has no MTP head")]
)
def test_where_speculation_is_required_a_wrong_head_is_fatal(
    kind: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="the server left with"):
        start_server(folder_of(tmp_path, kind), *FLAGS, "--require-speculation")
    assert reason in capfd.readouterr().err
