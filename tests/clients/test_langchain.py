"""LangChain: invoke, stream, batch, log-probabilities, and history of its own message classes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from headway_testing.daemon import Server


def test_langchain_works_from_invoke_to_history(chat_server: Server, environment: Path) -> None:
    session = Path(__file__).parent / "langchain_session.py"
    command = [environment / "python", "-P", session, chat_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["stream"] == told["invoke"] == "".join(told["tokens"]) == told["batch"][0] != ""
    assert (
        [usage["output_tokens"] for usage in told["stream_usage"]] == [told["usage"]["output_tokens"]] == [16]
    )
    assert len(told["batch"]) == 2
    assert told["history"] == told["from_elsewhere"] == "length"
    assert told["completion"] != ""
