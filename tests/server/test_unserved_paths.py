"""Known APIs that are not served, refusals that must not be repeated, and characters that end a line for some."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest

from headway.server.response import _json
from headway.server.sse import escape_line_ends

PATHS = [
    "/v1/embeddings", "/v1/audio/speech", "/v1/files",
    "/v1/images/generations", "/v1/batches", "/v1/moderations", "/v1/fine_tuning/jobs", "/v1/assistants",
    "/v1/threads/t/runs", "/v1/rerank", "/score", "/generate", "/embeddings", "/v1/chat/completions/c/messages", "/v1/complete",
    "/generate_stream", "/embedding", "/v2/embed", "/api/chat", "/api/tags", "/v1/organization/usage/costs",
]  # fmt: skip
RESOURCES = Path(str(openai.__file__)).parent / "resources"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_known_api_that_is_not_served_is_400(
    client: httpx.AsyncClient, path: str, method: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert "/v1/chat/completions" in response.json()["error"]["message"]


async def test_no_path_of_the_openai_package_is_404(client: httpx.AsyncClient) -> None:
    found = {
        path
        for file in RESOURCES.rglob("*.py")
        for path in re.findall(r'"(/[a-z_]+[^"]*)"', file.read_text())
    }
    assert {"/completions", "/responses", "/chat/completions/{completion_id}"} <= found
    for path in found - {"/models/{model}"}:
        url = "/v1" + re.sub(r"{[a-z_]+}", "x", path).removeprefix("/v1")
        answers = [await client.get(url), await client.post(url, json={})]
        assert {answer.status_code for answer in answers} <= {200, 400, 405}, url


async def test_other_paths_stay_404(client: httpx.AsyncClient) -> None:
    for path in ("/v1/responsesx", "/generated", "/v1/nonsense"):
        assert (await client.post(path)).status_code == 404


def test_a_payload_of_an_event_is_one_line_for_every_reader() -> None:
    payload = _json({"text": "a\u0085b\u2028c\u2029d\u2019é"})
    assert payload.decode().splitlines() == [payload.decode()]
    assert payload == b'{"text":"a\\u0085b\\u2028c\\u2029d\xe2\x80\x99\xc3\xa9"}'
    assert escape_line_ends(b"plain") == b"plain"
