"""LiteLLM's proxy before Headway: what one of its users asks in vain takes the model away from nobody."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import Server
from headway_testing.ports import free_port

MESSAGES = [{"role": "user", "content": "import os"}]
START_SECONDS = 180.0
COOLDOWN_SECONDS = 0.5  # within which the proxy has put a deployment into cooldown, if it does
IN_VAIN = {
    "/v1/embeddings": {"input": "hello"},
    "/v1/moderations": {"input": "hello"},
    "/v1/images/generations": {"prompt": "a cat"},
    "/v1/audio/speech": {"input": "hello", "voice": "alloy"},
}


@pytest.fixture(scope="module")
def proxy(
    chat_server: Server, environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Names the model, passes on every other name, and has LiteLLM's own rules for cooldowns. Names behind
    shared/ are of one deployment."""
    folder = tmp_path_factory.mktemp("litellm")
    backend = {"api_base": f"{chat_server.url}/v1", "api_key": "none"}
    names = {"demo-chat": "demo-chat", "*": "*", "shared/*": "*"}
    models = [
        {"model_name": name, "litellm_params": backend | {"model": f"openai/{served}"}}
        for name, served in names.items()
    ]
    config = {"model_list": models, "litellm_settings": {"num_retries": 0}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        environment / "litellm", "--config", folder / "config.yaml", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    key = f"sk-{secrets.token_hex(24)}"
    environ = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key, "PYTHONPATH": "",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
            _wait_until_alive(client, process, folder / "log")
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_alive(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(httpx.TransportError):
            if client.get("/health/liveliness").status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the proxy did not start: {log.read_text()}")


def chat(proxy: httpx.Client, model: str = "demo-chat", **body: object) -> httpx.Response:
    return proxy.post(
        "/v1/chat/completions", json={"model": model, "messages": MESSAGES, "max_tokens": 4} | body
    )


@pytest.fixture(autouse=True)
def _served(proxy: httpx.Client) -> None:
    """Each test begins with a model that is there: a cooldown of the test before lasts 5 s."""
    deadline = time.monotonic() + 30
    while chat(proxy).status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.5)


def test_a_wrong_name_takes_the_right_one_of_its_deployment_from_nobody(proxy: httpx.Client) -> None:
    for _ in range(3):
        assert chat(proxy, "shared/gpt-4o").status_code == 404
        time.sleep(COOLDOWN_SECONDS)
        answer = chat(proxy, "shared/demo-chat")
        assert answer.status_code == 200, answer.text


def test_chats_and_streams_pass_through(proxy: httpx.Client) -> None:
    whole = chat(proxy, temperature=0)
    assert whole.status_code == 200, whole.text
    assert whole.json()["usage"]["completion_tokens"] == 4
    with proxy.stream(
        "POST", "/v1/chat/completions",
        json={"model": "demo-chat", "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True},
    ) as stream:  # fmt: skip
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(d.get("content") or "" for d in deltas) == whole.json()["choices"][0]["message"]["content"]


def test_responses_pass_through(proxy: httpx.Client) -> None:
    body = {"model": "demo-chat", "input": "import os", "max_output_tokens": 16, "temperature": 0}
    whole = proxy.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    (item,) = whole.json()["output"]
    with proxy.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == item["content"][0]["text"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 16


@pytest.mark.parametrize("path", IN_VAIN)
def test_a_path_that_is_not_served_takes_the_model_from_nobody(proxy: httpx.Client, path: str) -> None:
    for _ in range(3):
        refused = proxy.post(path, json={"model": "demo-chat", **IN_VAIN[path]})
        assert 400 <= refused.status_code < 500, refused.text
        time.sleep(COOLDOWN_SECONDS)
        answer = chat(proxy)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("model", "body"),
    [("gpt-4o", {}), ("demo-chat", {"temperature": 3}), ("demo-chat", {"max_tokens": 10**6})],
    ids=["other-model", "value", "length"],
)
def test_a_request_that_is_refused_takes_the_model_from_nobody(
    proxy: httpx.Client, model: str, body: dict[str, object]
) -> None:
    for _ in range(3):
        refused = chat(proxy, model, **body)
        assert 400 <= refused.status_code < 500, refused.text
        time.sleep(COOLDOWN_SECONDS)
        answer = chat(proxy)
        assert answer.status_code == 200, answer.text
