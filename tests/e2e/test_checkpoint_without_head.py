"""A Qwen3.5 checkpoint whose config.json announces an MTP head that its files lack, as some quantised copies
are published."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import headway_command, start_server, stop_server
from headway_testing.hybrid import HybridOracle

from headway.engine.bench.shape import made_up_tokenizer

pytestmark = pytest.mark.slow

VOCAB_SIZE = 300


@pytest.mark.parametrize(
    "sees_images", [False, pytest.param(True, marks=pytest.mark.long)], ids=["text", "text-and-images"]
)
def test_banner_readiness_and_inspection_say_that_nothing_drafts(
    sees_images: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    oracle = HybridOracle(vocab_size=VOCAB_SIZE)
    folder = oracle.save(tmp_path / "model", with_head=False, sees_images=sees_images)
    (folder / "tokenizer.json").write_text(json.dumps(made_up_tokenizer(VOCAB_SIZE)))
    server = start_server(str(folder), "--threads", "1", "--kv-cache-memory", "16MiB", "--depth", "3")
    try:
        ready = httpx.get(f"{server.url}/ready").json()["engine"]
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
    finally:
        assert stop_server(server) == 0
    said = "".join(capfd.readouterr())
    assert (ready["depth"], ready["drafter"], ready["has_draft_head"]) == (0, "none", False)
    assert usage["completion_tokens"] == 5
    assert "0: no MTP head is loaded (--drafter ngram drafts without one)" in said
    assert "announces a draft head of 1 layers, the weights have none" in said
    assert "up to 3 drafts a round are wanted, but " in said

    command = headway_command("inspect", str(folder), "--device", "cpu", "--json")
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["model"]
    assert told["draft_head"]["state"] == "missing"
    assert "no tensor's name begins with mtp." in told["draft_head"]["reason"]
    assert (told["engine"]["depth"], told["engine"]["has_draft_head"]) == (0, False)
    assert any("no MTP head" in line for line in told["warnings"])
