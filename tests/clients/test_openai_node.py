"""The official JavaScript client under Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from headway_testing.daemon import Server
from headway_testing.tools import installed


def test_the_javascript_client_works_from_completions_to_errors(chat_server: Server) -> None:
    session = Path(__file__).parent / "openai_session.mjs"
    command = [installed("node"), session, chat_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["streamed"] == told["completion"] != ""
    assert told["streamedUsage"]["completion_tokens"] == told["usage"]["completion_tokens"] == 24
    assert told["chatStreamed"] == told["chat"] == "".join(told["tokens"]) != ""
    assert told["history"] == "length"
    assert told["left"] == "text_completion"
    name, status, message = told["error"]
    assert (name, status) == ("BadRequestError", 400)
    assert "temperature is 3" in message
    chat_server.wait_until_idle()
