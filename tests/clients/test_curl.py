"""curl as people type it: with an upgrade to HTTP/2 offered, and in HTTP/1.0."""

from __future__ import annotations

import json
import subprocess

import pytest
from headway_testing.daemon import Server
from headway_testing.tools import installed

BODY = json.dumps({"prompt": "import os\n", "max_tokens": 4})


def curl(*arguments: str) -> str:
    command = [
        installed("curl"),
        "--silent",
        "--show-error",
        "--fail-with-body",
        "--max-time",
        "30",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["--http2", "--http1.1", "--http1.0"])
def test_curl_is_answered_whatever_version_it_offers(server: Server, version: str) -> None:
    answer = json.loads(curl(version, f"{server.url}/v1/completions", "-d", BODY))
    assert answer["usage"]["completion_tokens"] == 4


def test_a_connection_that_offered_http2_is_used_again(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    answers = curl("--http2", url, "-d", BODY, "--next", "--http2", "--silent", url, "-d", BODY)
    decoder = json.JSONDecoder()
    _, end = decoder.raw_decode(answers)
    assert decoder.raw_decode(answers[end:].strip())[0]["usage"]["completion_tokens"] == 4
