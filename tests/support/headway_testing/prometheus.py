"""A real Prometheus that scrapes what its configuration names, for tests of any folder."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from headway_testing.tools import installed

Sample = tuple[dict[str, str], float]


class Prometheus:
    """A running one, asked over its API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Sample]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        return [(entry["metric"], float(entry["value"][1])) for entry in answer["data"]["result"]]

    def rules(self) -> list[dict[str, Any]]:
        groups = httpx.get(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def running_prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Once it is ready. folder: an empty one, for its configuration and its data."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            installed("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}", "--log.level=warn",
        ]
    )  # fmt: skip
    running = Prometheus(f"http://{address}")
    try:
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline, "Prometheus did not become ready"
            assert process.poll() is None, f"Prometheus left with {process.returncode}"
            with suppress(httpx.TransportError):
                if httpx.get(f"{running.url}/-/ready").status_code == 200:
                    break
            time.sleep(0.1)
        yield running
    finally:
        process.terminate()
        process.wait(timeout=30)
