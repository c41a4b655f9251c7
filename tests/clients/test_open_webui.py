"""Open WebUI's server, without its pages: the models that it finds, and its chats whole, streamed and for a
title."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing.daemon import Server, get_plain
from headway_testing.ports import free_port

MODEL = "demo-tools"
START_SECONDS = 300.0
# No account, no other server, no network.
SETTINGS = {
    "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "secret", "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "AUDIO_STT_ENGINE": "openai", "ENABLE_VERSION_UPDATE_CHECK": "False",
    "ANONYMIZED_TELEMETRY": "False", "DO_NOT_TRACK": "true", "SCARF_NO_ANALYTICS": "true",
}  # fmt: skip


@pytest.fixture(scope="module")
def webui(
    scripted_server: Server, environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of the server with the token of its one user."""
    folder = tmp_path_factory.mktemp("webui")
    port = free_port()
    programs = environment.parent / "webui/bin"
    variables = {
        **SETTINGS, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "DATA_DIR": str(folder),
        "OPENAI_API_BASE_URL": f"{scripted_server.url}/v1",
    }  # fmt: skip
    command = [programs / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, folder / "log")
        with httpx.Client(base_url=url, timeout=120) as client:
            user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
            client.headers["Authorization"] = f"Bearer {user['token']}"
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if get_plain(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def asked(webui: httpx.Client, path: str, content: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    response = webui.post(path, json={"model": MODEL, "messages": messages, **fields})
    assert response.status_code == 200, response.text
    return response


def test_the_served_model_is_found(webui: httpx.Client) -> None:
    assert MODEL in [model["id"] for model in webui.get("/api/models").json()["data"]]


def test_a_chat_whole_and_streamed_with_all_its_settings(webui: httpx.Client) -> None:
    whole = asked(webui, "/api/chat/completions", "Hello there.", stream=False).json()
    assert whole["choices"][0]["message"]["content"] == "Hello there."
    settings = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 3,
        "repeat_penalty": 1.1,
        "max_tokens": 200,
        "stop": ["\n#"],
    }
    script = "<think>\nThey greet.\n</think>\n\nHello there."
    lines = asked(webui, "/api/chat/completions", script, stream=True, params=settings).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", [])]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello there."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas).strip() == "They greet."


def test_a_title_for_a_chat(webui: httpx.Client) -> None:
    answer = asked(webui, "/api/v1/tasks/title/completions", "Hello there.").json()
    assert "Hello there." in answer["choices"][0]["message"]["content"]
