"""A cold and a warm run of the same prompts by the official client give the same texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
from headway_testing.daemon import Server

SCRIPT = Path(__file__).with_name("same_texts.py")


def same_texts(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), f"{url}/v1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_a_cold_and_a_warm_run_give_the_same_hundred_texts(server: Server) -> None:
    done = same_texts(server.url, "--max-tokens", "12", "--concurrency", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cold: 10 of 100, about " in done.stderr
    cold, *warm = done.stdout.splitlines()
    found = [int(re.search(r"([\d,]+) prompt tokens", line)[1].replace(",", "")) for line in (cold, *warm)]  # type: ignore[index]
    assert [line.partition(":")[2].partition(",")[0] for line in warm] == 2 * [
        " 100 of 100 texts are the same"
    ]
    assert found[0] < 100 * 16
    assert min(found[1:]) > 100 * 32


class Forgetful(BaseHTTPRequestHandler):
    """Gives another text each time."""

    numbers = count()

    def do_GET(self) -> None:
        self._answer(
            {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "m"}]}
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {
            "index": 0,
            "text": f"text {next(self.numbers)}",
            "finish_reason": "length",
            "logprobs": None,
        }
        self._answer(
            {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
        )

    def _answer(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""


@pytest.fixture
def forgetful_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_texts_that_differ_are_shown(forgetful_server: str) -> None:
    done = same_texts(forgetful_server, "--prompts", "4")
    assert done.returncode == 1, done.stderr
    assert "warm: 0 of 4 texts are the same" in done.stdout
    assert "cold: 'text 0'" in done.stdout
    assert "then: 'text 4'" in done.stdout


def test_it_says_how_to_install_the_client_where_it_is_missing() -> None:
    lines = (
        "import runpy, sys",
        "sys.modules['openai'] = None",
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')",
    )
    command = [sys.executable, "-P", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("the package openai is not installed")
    assert done.stderr.endswith("-m pip install openai\n")
