"""The JDK's HttpClient, under LangChain4j, Spring AI and others: by its defaults every request offers
HTTP/2."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from headway_testing.daemon import Server
from headway_testing.tools import installed

Answers = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def told(server: Server) -> Answers:
    """(status, body) of each step; a stream's has one for each line. All went over one client, in this
    order."""
    source = Path(__file__).parent / "HttpClientSession.java"
    command = [installed("java"), source, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    answers: Answers = defaultdict(list)
    for line in done.stdout.splitlines():
        step, version, status, body = line.split("\t", maxsplit=3)
        assert version == "HTTP_1_1", f"{step}: the upgrade is an offer that this server does not take"
        answers[step].append((status, body))
    return answers


@pytest.mark.parametrize("step", ["first", "second", "expect-continue", "unknown-length", "http1.1"])
def test_a_request_that_offers_http2_is_answered_over_http1(told: Answers, step: str) -> None:
    ((status, body),) = told[step]
    assert status == "200", body
    assert json.loads(body)["usage"]["completion_tokens"] == 8
    assert json.loads(body)["choices"] == json.loads(told["http1.1"][0][1])["choices"]


def test_a_streams_lines_say_the_same_as_the_answer(told: Answers) -> None:
    *lines, last = [body.removeprefix("data: ") for _, body in told["stream"]]
    assert last == "[DONE]"
    text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
    assert text == json.loads(told["first"][0][1])["choices"][0]["text"] != ""


def test_errors_and_other_methods_are_read_whole(told: Answers) -> None:
    ((status, body),) = told["refused"]
    assert (status, json.loads(body)["error"]["param"]) == ("400", "temperature")
    assert told["health"][0][0] == "200"
    assert told["head"] == [("200", "")]
